//! A cursor over JSON text: reads where the values are, decodes a string straight to where it is wanted.
//!
//! The canonical prompt is made in one pass over the body, and a later turn starts in the middle of it;
//! neither can be had from a deserializer that owns the input from its first byte to its last.

use std::borrow::Cow;

use super::error::BadBody;
use super::scan;

/// Containers nested deeper than this are refused, as serde_json does.
pub(crate) const MAX_DEPTH: usize = 128;

type Result<T> = std::result::Result<T, BadBody>;

/// A string as it stands in the text, without its quotes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Text<'a> {
    raw: &'a [u8],
    escaped: bool,
}

impl<'a> Text<'a> {
    /// Appends the decoded bytes.
    pub fn decode_into(self, out: &mut Vec<u8>) {
        if self.escaped {
            // Scanned already, so it cannot fail.
            let _ = scan::decode(self.raw, 0, out, false);
        } else {
            out.extend_from_slice(self.raw);
        }
    }

    /// The decoded string; `None` when it is not UTF-8 (a lone surrogate).
    pub fn decode(self) -> Option<Cow<'a, str>> {
        if !self.escaped {
            return std::str::from_utf8(self.raw).ok().map(Cow::Borrowed);
        }
        let mut out = Vec::with_capacity(self.raw.len());
        self.decode_into(&mut out);
        String::from_utf8(out).ok().map(Cow::Owned)
    }

    /// The decoded bytes.
    pub fn bytes(self) -> Cow<'a, [u8]> {
        if !self.escaped {
            return Cow::Borrowed(self.raw);
        }
        let mut out = Vec::with_capacity(self.raw.len());
        self.decode_into(&mut out);
        Cow::Owned(out)
    }
}

/// A place in a JSON text.
#[derive(Debug, Clone)]
pub(crate) struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub const fn new(text: &'a [u8]) -> Self {
        Self { text, at: 0 }
    }

    pub const fn at(&self) -> usize {
        self.at
    }

    /// Goes on at another place of the same text.
    pub const fn jump(&mut self, at: usize) {
        self.at = at;
    }

    /// The text from the cursor on.
    pub fn rest(&self) -> &'a [u8] {
        self.text.get(self.at..).unwrap_or_default()
    }

    /// The text between an earlier place and the cursor.
    pub fn since(&self, start: usize) -> &'a [u8] {
        self.text.get(start..self.at).unwrap_or_default()
    }

    pub fn bad<T>(&self) -> Result<T> {
        Err(BadBody::malformed(self.at))
    }

    fn byte(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    /// The first byte of the next token.
    pub fn peek(&mut self) -> Option<u8> {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.byte() {
            self.at += 1;
        }
        self.byte()
    }

    fn take(&mut self, token: u8) -> Result<()> {
        if self.peek() != Some(token) {
            return self.bad();
        }
        self.at += 1;
        Ok(())
    }

    /// Nothing but white space may follow.
    pub fn end(&mut self) -> Result<()> {
        self.peek().map_or(Ok(()), |_| self.bad())
    }

    /// Enters an object.
    pub fn object(&mut self) -> Result<()> {
        self.take(b'{')
    }

    /// Enters an array.
    pub fn array(&mut self) -> Result<()> {
        self.take(b'[')
    }

    /// The next key of the object entered, with the cursor at its value; `None` at the end of the object.
    pub fn key(&mut self, first: &mut bool) -> Result<Option<Cow<'a, [u8]>>> {
        if !self.more(first, b'}')? {
            return Ok(None);
        }
        let key = self.string()?;
        self.take(b':')?;
        Ok(Some(key.bytes()))
    }

    /// Whether the array entered has one more element, with the cursor at it.
    pub fn element(&mut self, first: &mut bool) -> Result<bool> {
        self.more(first, b']')
    }

    fn more(&mut self, first: &mut bool, close: u8) -> Result<bool> {
        match self.peek() {
            Some(token) if token == close => {
                self.at += 1;
                return Ok(false);
            }
            Some(b',') if !*first => self.at += 1,
            Some(_) if *first => {}
            _ => return self.bad(),
        }
        *first = false;
        Ok(true)
    }

    /// Reads a string where it stands.
    pub fn string(&mut self) -> Result<Text<'a>> {
        self.take(b'"')?;
        let start = self.at;
        let (end, escaped) = scan::skip(self.text, start).map_err(BadBody::malformed)?;
        self.at = end + 1;
        Ok(Text { raw: &self.text[start..end], escaped })
    }

    /// Reads a string and appends its decoded bytes: one pass.
    pub fn string_into(&mut self, out: &mut Vec<u8>) -> Result<()> {
        self.take(b'"')?;
        self.at = scan::decode(self.text, self.at, out, true).map_err(BadBody::malformed)? + 1;
        Ok(())
    }

    /// Skips one value, checking its grammar; gives its text.
    pub fn skip(&mut self) -> Result<&'a [u8]> {
        self.peek();
        let start = self.at;
        self.skip_at(0)?;
        Ok(self.since(start))
    }

    fn skip_at(&mut self, depth: usize) -> Result<()> {
        let mut first = true;
        match self.peek() {
            _ if depth > MAX_DEPTH => return self.bad(),
            Some(b'{') => {
                self.at += 1;
                while self.key(&mut first)?.is_some() {
                    self.skip_at(depth + 1)?;
                }
            }
            Some(b'[') => {
                self.at += 1;
                while self.element(&mut first)? {
                    self.skip_at(depth + 1)?;
                }
            }
            Some(b'"') => {
                self.string()?;
            }
            _ => {
                self.scalar()?;
            }
        }
        Ok(())
    }

    /// A number, `true`, `false` or `null`.
    pub fn scalar(&mut self) -> Result<&'a [u8]> {
        self.peek();
        let rest = self.rest();
        let len = rest
            .iter()
            .position(|b| !matches!(b, b'+' | b'-' | b'.' | b'0'..=b'9' | b'a'..=b'z' | b'E'))
            .unwrap_or(rest.len());
        let word = &rest[..len];
        if !matches!(word, b"true" | b"false" | b"null") && !is_number(word) {
            return self.bad();
        }
        self.at += len;
        Ok(word)
    }

    /// The string here; any other value is skipped and gives `None`.
    pub fn opt_string(&mut self) -> Result<Option<Text<'a>>> {
        if self.peek() == Some(b'"') {
            return self.string().map(Some);
        }
        self.skip()?;
        Ok(None)
    }
}

/// `-? int frac? exp?`
fn is_number(word: &[u8]) -> bool {
    fn digits(word: &[u8]) -> usize {
        word.iter().take_while(|b| b.is_ascii_digit()).count()
    }
    let word = word.strip_prefix(b"-").unwrap_or(word);
    let int = digits(word);
    if int == 0 || (int > 1 && word[0] == b'0') {
        return false;
    }
    let mut rest = &word[int..];
    if let Some(frac) = rest.strip_prefix(b".") {
        let n = digits(frac);
        if n == 0 {
            return false;
        }
        rest = &frac[n..];
    }
    if let Some((b'e' | b'E', exp)) = rest.split_first() {
        let exp = exp.strip_prefix(b"+").or_else(|| exp.strip_prefix(b"-")).unwrap_or(exp);
        let n = digits(exp);
        return n > 0 && n == exp.len();
    }
    rest.is_empty()
}

/// The string member `name` of the object in `text`; `None` when absent, of another type, or not an object.
pub(crate) fn member<'a>(text: &'a [u8], name: &str) -> Option<Cow<'a, str>> {
    let mut cursor = Cursor::new(text);
    let (mut first, mut found) = (true, None);
    cursor.object().ok()?;
    while let Some(key) = cursor.key(&mut first).ok()? {
        if *key == *name.as_bytes() {
            found = cursor.opt_string().ok()?;
        } else {
            cursor.skip().ok()?;
        }
    }
    found?.decode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decoded(text: &str) -> Vec<u8> {
        let mut out = Vec::new();
        Cursor::new(text.as_bytes()).string_into(&mut out).expect("a string");
        out
    }

    proptest! {
        #[test]
        fn strings_decode_as_serde_json_does(s in any::<String>()) {
            let text = serde_json::to_string(&s).expect("json");
            prop_assert_eq!(decoded(&text), s.as_bytes());
            let escaped: String = format!("\"{}\"", s.encode_utf16().map(|u| format!("\\u{u:04X}")).collect::<String>());
            prop_assert_eq!(decoded(&escaped), s.as_bytes());
            let got = Cursor::new(escaped.as_bytes()).string().expect("string").decode().map(Cow::into_owned);
            prop_assert_eq!(got, Some(s));
        }

        #[test]
        fn accepts_what_serde_json_accepts(text in r#"[\[\]{},:"\\u0-9a-f.eE+\- tnrls]{0,12}"#) {
            let mut cursor = Cursor::new(text.as_bytes());
            let ours = cursor.skip().and_then(|_| cursor.end()).is_ok();
            // RawValue: out-of-range numbers and lone surrogates are not grammar.
            let theirs = serde_json::from_str::<&serde_json::value::RawValue>(&text).is_ok();
            prop_assert_eq!(ours, theirs, "{}", text);
        }
    }

    #[test]
    fn grammar() {
        for good in
            ["{}", "[ ]", " [1, -0.5e+3, true ,null, {\"a\" : [] }] ", "123456789012345678901234567890"]
        {
            let mut c = Cursor::new(good.as_bytes());
            assert!(c.skip().is_ok() && c.end().is_ok(), "{good}");
        }
        for bad in [
            "",
            "{",
            "[1,]",
            "{,}",
            "[1 2]",
            "{\"a\"}",
            "{\"a\":}",
            "01",
            "1.",
            "nul",
            "\"a",
            "\"\n\"",
            "\"\\x\"",
            "{\"a\":1,}",
        ] {
            let mut c = Cursor::new(bad.as_bytes());
            assert!(c.skip().is_err() || c.end().is_err(), "{bad}");
        }
        let deep = "[".repeat(100_000);
        assert!(Cursor::new(deep.as_bytes()).skip().is_err());
    }

    #[test]
    fn members_last_wins() {
        let object = br#"{"a":"x","n":1,"\u0061":"z"}"#;
        assert_eq!(member(object, "a").as_deref(), Some("z"));
        assert_eq!(member(object, "n"), None);
        assert_eq!(member(b"\"oops\"", "a"), None);
    }
}
