//! One pass over a request body: its fields and its canonical prompt.

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::api::Api;
use super::canonical::{ItemKind, PART, Writer};
use super::content::content;
use super::error::BadBody;
use super::fields::Found;
use super::item::item;
use super::json::Cursor;
use super::known::{End, Known, Prefixes, Resumed, marks};
use super::layout::Builder;
use super::neutral;
use super::parsed::Prompt;

type Result<T> = std::result::Result<T, BadBody>;

/// Reads a request body of `api`. A body whose beginning is in `prefixes` is read from there on only.
///
/// # Errors
/// [`BadBody`] for malformed JSON, and for a missing or wrongly typed `model` or prompt.
pub fn read<'a>(api: Api, body: &'a [u8], prefixes: &impl Prefixes) -> Result<Prompt<'a>> {
    if let Some(prompt) = Reader::new(api, body).quick(prefixes)? {
        return Ok(prompt);
    }
    utf8(body)?;
    let mut reader = Reader::new(api, body);
    reader.object(None::<&()>)?;
    reader.head = reader.head_digest();
    reader.finish()
}

/// The canonical text of a body: what its block chain covers.
///
/// # Errors
/// As [`read`].
pub fn canonical(api: Api, body: &[u8]) -> Result<Vec<u8>> {
    utf8(body)?;
    let mut reader = Reader::new(api, body);
    reader.object(None::<&()>)?;
    let mut head = reader.head()?;
    head.buf.extend_from_slice(&reader.messages.buf);
    Ok(head.buf)
}

/// Bytes whose encoding is checked together.
const PIECE: usize = 2048;

/// Checks that a text is UTF-8. Most of it is ASCII, which is several times quicker to see.
fn utf8(text: &[u8]) -> Result<()> {
    let mut at = 0;
    while at < text.len() {
        let piece = &text[at..text.len().min(at + PIECE)];
        if piece.is_ascii() {
            at += piece.len();
            continue;
        }
        at += match std::str::from_utf8(piece) {
            Ok(_) => piece.len(),
            // A character goes on in the next piece.
            Err(e) if e.error_len().is_none() && e.valid_up_to() > 0 => e.valid_up_to(),
            Err(e) => return Err(BadBody::malformed(at + e.valid_up_to())),
        };
    }
    Ok(())
}

struct Reader<'a> {
    api: Api,
    cursor: Cursor<'a>,
    body: &'a [u8],
    found: Found<'a>,
    tools: Option<&'a [u8]>,
    system: Option<&'a [u8]>,
    messages: Writer,
    /// The field the prompt came in.
    param: Option<&'static str>,
    array_at: Option<usize>,
    /// Raw ends of the messages read, from the `[` on.
    ends: Vec<usize>,
    /// What is known of the beginning, and how far that holds.
    resumed: Option<Resumed>,
    /// See [`Self::head_digest`].
    head: u64,
}

impl<'a> Reader<'a> {
    fn new(api: Api, body: &'a [u8]) -> Self {
        Self {
            api,
            cursor: Cursor::new(body),
            body,
            found: Found::default(),
            tools: None,
            system: None,
            messages: Writer::default(),
            param: None,
            array_at: None,
            ends: Vec::new(),
            resumed: None,
            head: 0,
        }
    }

    /// Reads only what is new; `None` when nothing is known, or when what stands before the messages changed.
    fn quick(mut self, prefixes: &impl Prefixes) -> Result<Option<Prompt<'a>>> {
        // Not knowing is decided at the messages' first byte: the rest is not read twice.
        if !self.object(Some(prefixes))? {
            return Ok(None);
        }
        let Some(Resumed { known, .. }) = &self.resumed else { return Ok(None) };
        self.head = self.head_digest();
        if known.head != self.head {
            return Ok(None);
        }
        self.finish().map(Some)
    }

    /// Reads the whole object; `false` when it was given prefixes and knows none.
    fn object<P: Prefixes>(&mut self, prefixes: Option<&P>) -> Result<bool> {
        let mut first = true;
        if self.cursor.peek() != Some(b'{') {
            self.cursor.skip()?;
            return Err(BadBody { message: "the request body must be a JSON object".into(), param: None });
        }
        self.cursor.object()?;
        while let Some(key) = self.cursor.key(&mut first)? {
            match (self.api, &*key) {
                (_, b"tools") if self.api != Api::Completions => self.tools = Some(self.cursor.skip()?),
                // Cursor sends bodies of the Responses shape to the chat endpoint.
                (Api::Messages, b"system") | (Api::Responses | Api::Chat, b"instructions") => {
                    self.system = Some(self.cursor.skip()?);
                }
                (Api::Completions, b"prompt") => self.prompt("prompt")?,
                (Api::Responses | Api::Chat, b"input") => {
                    if !self.items("input", prefixes)? {
                        return Ok(false);
                    }
                }
                (Api::Chat | Api::Messages, b"messages") => {
                    if !self.items("messages", prefixes)? {
                        return Ok(false);
                    }
                }
                _ => self.found.read(&key, &mut self.cursor)?,
            }
        }
        self.cursor.end()?;
        Ok(true)
    }

    /// The messages, or a single text in their place.
    fn items<P: Prefixes>(&mut self, param: &'static str, prefixes: Option<&P>) -> Result<bool> {
        self.messages = Writer::default();
        self.ends.clear();
        self.resumed = None;
        self.array_at = None;
        self.param = Some(param);
        let array = match self.cursor.peek() {
            Some(b'[') => true,
            Some(b'"') if param == "input" => false,
            Some(_) => return Err(BadBody::field(param, "must be an array")),
            None => return Err(BadBody::malformed(self.cursor.at())),
        };
        if !array {
            self.messages.open(b"user", ItemKind::User);
            content(&mut self.messages, &mut self.cursor)?;
            self.messages.close(ItemKind::User);
            return Ok(prefixes.is_none());
        }
        self.cursor.array()?;
        let start = self.cursor.at();
        self.array_at = Some(start);
        let mut unread = self.cursor.rest().len();
        let mut first = true;
        if let Some(prefixes) = prefixes {
            let rest = self.cursor.rest();
            let Some(resumed) = prefixes.find(rest).and_then(|known| Resumed::new(known, rest)) else {
                return Ok(false);
            };
            let known = resumed.mark.raw;
            utf8(&rest[known..])?;
            self.cursor.jump(start + known);
            self.resumed = Some(resumed);
            unread -= known;
            first = false;
        }
        self.messages.buf.reserve(unread);
        while self.cursor.element(&mut first)? {
            // A shape of the other API: `input` items even where chat messages are expected.
            let api = if param == "input" { Api::Responses } else { self.api };
            item(&mut self.messages, &mut self.cursor, api, param)?;
            self.ends.push(self.cursor.at() - start);
        }
        Ok(true)
    }

    /// A bare prompt: its text is the canonical text. Token ids count four bytes each.
    fn prompt(&mut self, param: &'static str) -> Result<()> {
        self.messages = Writer::default();
        self.param = Some(param);
        let w = &mut self.messages;
        match self.cursor.peek() {
            Some(b'"') => self.cursor.string_into(&mut w.buf)?,
            Some(b'[') => {
                let whole = self.cursor.skip()?;
                bare_array(w, &mut Cursor::new(whole), param)?;
            }
            Some(_) => return Err(BadBody::field(param, "must be a string or an array")),
            None => return Err(BadBody::malformed(self.cursor.at())),
        }
        w.bound(ItemKind::User);
        Ok(())
    }

    /// Tools and system in canonical form.
    fn head(&self) -> Result<Writer> {
        let mut w = Writer::default();
        if let Some(tools) = self.tools {
            write_tools(&mut w, tools)?;
        }
        if let Some(system) = self.system.filter(|s| !matches!(*s, b"null" | b"\"\"" | b"[]")) {
            w.open(b"system", ItemKind::System);
            content(&mut w, &mut Cursor::new(system))?;
            w.close(ItemKind::System);
        }
        Ok(w)
    }

    /// Claude's attribution block is part of the raw system text and changes on every request, so the system
    /// counts in canonical form; tools count as they stand.
    fn head_digest(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(self.found.model().as_bytes());
        hash.update(&[0]);
        hash.update(self.tools.unwrap_or_default());
        hash.update(&[0]);
        if let Some(system) = self.system {
            let mut w = Writer::default();
            w.open(b"", ItemKind::System);
            // A system that can't be written fails in `head`.
            if content(&mut w, &mut Cursor::new(system)).is_ok() {
                hash.update(&w.buf);
            }
        }
        hash.digest()
    }

    fn finish(self) -> Result<Prompt<'a>> {
        let Some(_) = self.param else {
            return Err(self.missing());
        };
        let head = if self.resumed.is_none() { Some(self.head()?) } else { None };
        let fields = self.found.finish()?;
        let written = self.messages.buf.len();
        let (mut builder, base, text_at) = match (&self.resumed, &head) {
            (Some(Resumed { known, mark, .. }), _) => {
                let b = Builder::resume(&known.layout, mark.items, mark.state, written);
                (b, mark.items, mark.state.bytes())
            }
            (None, Some(head)) => {
                let count = head.bounds.len() + self.messages.bounds.len();
                let mut b = Builder::new(&fields.model, head.buf.len() + written, count);
                b.extend(&head.buf, &head.bounds, |_, _| {});
                (b, head.bounds.len(), head.buf.len() as u64)
            }
            (None, None) => (Builder::new(&fields.model, written, 1), 0, 0),
        };
        let mut ends: Vec<End> = Vec::with_capacity(self.ends.len());
        builder.extend(&self.messages.buf, &self.messages.bounds, |i, state| {
            if let Some(&raw) = self.ends.get(i) {
                ends.push((raw, base + i + 1, state));
            }
        });
        let marks = self.array_at.map_or([None; 2], |start| marks(&self.body[start..], self.resumed, &ends));
        Ok(Prompt {
            api: self.api,
            fields,
            known: Known { layout: Arc::new(builder.finish()), head: self.head, marks },
            calls: self.messages.calls,
            array_at: self.array_at,
            text: self.messages.buf,
            text_at,
            bare: self.api == Api::Completions,
        })
    }

    fn missing(&self) -> BadBody {
        let param = match self.api {
            Api::Chat | Api::Messages => "messages",
            Api::Responses => "input",
            Api::Completions => "prompt",
        };
        BadBody::field(param, "is missing")
    }
}

/// Token ids, or the first of several prompts.
fn bare_array(w: &mut Writer, cursor: &mut Cursor<'_>, param: &'static str) -> Result<()> {
    let mut first = true;
    cursor.array()?;
    while cursor.element(&mut first)? {
        match cursor.peek() {
            Some(b'"') => return cursor.string_into(&mut w.buf),
            Some(b'[') => return bare_array(w, cursor, param),
            _ => {}
        }
        let id = std::str::from_utf8(cursor.skip()?).ok().and_then(|id| id.parse::<u32>().ok());
        let id = id.ok_or_else(|| BadBody::field(param, "must hold strings or token ids"))?;
        w.buf.extend_from_slice(&id.to_le_bytes());
    }
    Ok(())
}

/// All tools are one item.
fn write_tools(w: &mut Writer, tools: &[u8]) -> Result<()> {
    let mut cursor = Cursor::new(tools);
    if matches!(tools, b"null") {
        return Ok(());
    }
    w.open(b"tools", ItemKind::Tools);
    if cursor.peek() == Some(b'[') {
        let (mut first, mut none) = (true, true);
        cursor.array()?;
        while cursor.element(&mut first)? {
            none = false;
            neutral::write(&mut cursor, &mut w.buf, neutral::TOOL)?;
            w.buf.push(PART);
        }
        if none {
            w.buf.clear();
            return Ok(());
        }
    } else {
        neutral::write(&mut cursor, &mut w.buf, &[])?;
    }
    w.close(ItemKind::Tools);
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        /// Whatever stands where pieces meet, and wherever it is cut.
        #[test]
        fn as_in_one(pad in super::PIECE - 6..super::PIECE + 2, text in "(é|😀|a|€){0,8}", cut in 0usize..40, tail in 0usize..3000) {
            let text = format!("{}{text}{}é", "x".repeat(pad), "y".repeat(tail));
            let bytes = &text.as_bytes()[cut.min(2)..text.len() - cut.min(text.len() / 2)];
            for broken in [false, true] {
                let mut bytes = bytes.to_vec();
                if broken {
                    let at = bytes.len() / 2 + cut;
                    bytes[at] = 0xC3;
                }
                prop_assert_eq!(super::utf8(&bytes).is_ok(), std::str::from_utf8(&bytes).is_ok());
            }
        }
    }
}
