//! Takes out of a body what some engines choke on. Everything else stays as it is, byte for byte.

use super::api::Api;
use super::error::BadBody;
use super::json::Cursor;

type Result<T> = std::result::Result<T, BadBody>;

/// How Claude Code's attribution begins; it changes with every request and is not prompt.
pub(crate) const ATTRIBUTION: &str = "x-anthropic-billing-header";

/// What to take out. Neither changes the prompt the model sees, nor how a turn is routed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Strip {
    /// Claude Code's attribution text at the head of `system`.
    pub attribution: bool,
    /// `cache_control` of tools, messages and their content; a tool's own schema may have such a property.
    pub cache_control: bool,
}

impl Strip {
    /// The body without it; `None` when there is nothing to take out.
    ///
    /// # Errors
    /// [`BadBody`] for malformed JSON.
    pub fn body(self, api: Api, body: &[u8]) -> Result<Option<Vec<u8>>> {
        if self == Self::default() || api == Api::Completions {
            return Ok(None);
        }
        let mut cuts = Cuts { strip: self, ranges: Vec::new() };
        cuts.object(&mut Cursor::new(body), |cuts, key, cursor| match key {
            b"tools" | b"messages" | b"input" => cuts.blocks(cursor, false),
            b"system" => cuts.blocks(cursor, true),
            _ => cursor.skip().map(drop),
        })?;
        Ok(cuts.applied(body))
    }
}

/// Ranges to cut, in order.
struct Cuts {
    strip: Strip,
    ranges: Vec<(usize, usize)>,
}

/// One member or element: where the separator before it begins and ends, where it ends, whether it goes.
type Entry = (usize, usize, usize, bool);

impl Cuts {
    /// An object: `inner` reads the value of each member that stays.
    fn object<'a>(
        &mut self,
        cursor: &mut Cursor<'a>,
        mut inner: impl FnMut(&mut Self, &[u8], &mut Cursor<'a>) -> Result<()>,
    ) -> Result<()> {
        let (mut entries, mut first) = (Vec::<Entry>::new(), true);
        cursor.object()?;
        loop {
            let (before, start) = separator(cursor);
            let Some(key) = cursor.key(&mut first)? else { break };
            let goes = self.strip.cache_control && &*key == b"cache_control";
            if goes {
                cursor.skip()?;
            } else {
                inner(self, &key, cursor)?;
            }
            entries.push((before, start, cursor.at(), goes));
        }
        self.cut(&entries);
        Ok(())
    }

    /// Tools, messages, or the parts of a content; `system` may hold the attribution.
    fn blocks(&mut self, cursor: &mut Cursor<'_>, system: bool) -> Result<()> {
        match cursor.peek() {
            Some(b'[') => {}
            Some(b'"') if system => return self.text(cursor).map(drop),
            _ => return cursor.skip().map(drop),
        }
        let (mut entries, mut first) = (Vec::<Entry>::new(), true);
        cursor.array()?;
        loop {
            let (before, start) = separator(cursor);
            if !cursor.element(&mut first)? {
                break;
            }
            let mut goes = false;
            if cursor.peek() == Some(b'{') {
                self.object(cursor, |cuts, key, cursor| match key {
                    b"content" => cuts.blocks(cursor, false),
                    b"text" if system => {
                        goes = cuts.text(cursor)?;
                        Ok(())
                    }
                    _ => cursor.skip().map(drop),
                })?;
            } else {
                cursor.skip()?;
            }
            entries.push((before, start, cursor.at(), goes));
        }
        self.cut(&entries);
        Ok(())
    }

    /// A text of the system: its attribution goes up to the end of the line. Whether nothing is left of it.
    fn text(&mut self, cursor: &mut Cursor<'_>) -> Result<bool> {
        cursor.peek();
        let start = cursor.at() + 1;
        let Some(text) = cursor.opt_string()? else { return Ok(false) };
        if !self.strip.attribution || !text.bytes().starts_with(ATTRIBUTION.as_bytes()) {
            return Ok(false);
        }
        let raw = cursor.since(start);
        let line = memchr::memmem::find(raw, b"\\n").map(|at| at + 2);
        self.ranges.push((start, line.map_or(cursor.at() - 1, |line| start + line)));
        Ok(line.is_none())
    }

    /// Cuts the entries that go, each with one separator.
    fn cut(&mut self, entries: &[Entry]) {
        let (mut kept, mut dropped) = (false, false);
        for &(before, start, end, goes) in entries {
            match goes {
                true => self.ranges.push((before, end)),
                false if dropped && !kept => self.ranges.push((before, start)),
                false => {}
            }
            kept |= !goes;
            dropped |= goes;
        }
    }

    fn applied(mut self, body: &[u8]) -> Option<Vec<u8>> {
        if self.ranges.is_empty() {
            return None;
        }
        self.ranges.sort_unstable();
        let (mut out, mut at) = (Vec::with_capacity(body.len()), 0);
        for (start, end) in self.ranges {
            // A range may lie within an entry that goes as a whole.
            if start >= at {
                out.extend_from_slice(&body[at..start]);
            }
            at = at.max(end);
        }
        out.extend_from_slice(&body[at..]);
        Some(out)
    }
}

/// Where the separator before the next entry begins, and where it ends.
fn separator(cursor: &mut Cursor<'_>) -> (usize, usize) {
    let before = cursor.at();
    match cursor.peek() {
        Some(b',') => (before, cursor.at() + 1),
        _ => (before, before),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::read;

    const ALL: Strip = Strip { attribution: true, cache_control: true };

    fn stripped(strip: Strip, body: &str) -> Option<String> {
        strip.body(Api::Messages, body.as_bytes()).unwrap().map(|out| String::from_utf8(out).unwrap())
    }

    #[test]
    fn only_what_is_named_goes() {
        let body = r#"{ "z":1e400, "system" : [ {"type":"text","text":"x-anthropic-billing-header: a; cch=1;"} , {"cache_control":{"type":"ephemeral"}, "text":"be\u0020brief"}],
            "tools":[{"name":"t","cache_control":{},"input_schema":{"properties":{"cache_control":{"a":[]}}}}],"x":1,"x":2,
            "messages":[{"role":"user","content":[{"type":"text","text":"cache_control","cache_control":null},{"type":"tool_result","content":[{"cache_control":{}}]}]},
            {"role":"assistant","content":[{"type":"tool_use","input":{"cache_control":1}}]}], "cache_control":{"type":"ephemeral"} }"#;
        let expected = r#"{ "z":1e400, "system" : [ {"text":"be\u0020brief"}],
            "tools":[{"name":"t","input_schema":{"properties":{"cache_control":{"a":[]}}}}],"x":1,"x":2,
            "messages":[{"role":"user","content":[{"type":"text","text":"cache_control"},{"type":"tool_result","content":[{}]}]},
            {"role":"assistant","content":[{"type":"tool_use","input":{"cache_control":1}}]}] }"#;
        let squeezed = |text: &str| {
            text.replace("[ {", "[{").replace(" {\"text", "{\"text").replace("{ \"text", "{\"text")
        };
        assert_eq!(squeezed(&stripped(ALL, body).unwrap()), squeezed(expected));
        assert_eq!(stripped(Strip::default(), body), None);
        let clean = r#"{"model":"m","messages":[{"content":[{"text":"x"}]}]}"#;
        assert_eq!(stripped(ALL, clean), None);
    }

    #[test]
    fn a_line_of_attribution_goes_and_the_rest_stays() {
        let body = r#"{"system":"x-anthropic-billing-header: a;\n\nYou are","messages":[]}"#;
        assert_eq!(stripped(ALL, body).unwrap(), r#"{"system":"\nYou are","messages":[]}"#);
        let alone = r#"{"system":[{"type":"text","text":"x-anthropic-billing-header: a;"}],"messages":[]}"#;
        assert_eq!(stripped(ALL, alone).unwrap(), r#"{"system":[],"messages":[]}"#);
        let other = Strip { attribution: false, cache_control: true };
        assert_eq!(stripped(other, alone), None);
    }

    #[test]
    fn the_prompt_is_the_same_without_it() {
        let body = r#"{"model":"m","system":[{"type":"text","text":"x-anthropic-billing-header: cch=7;"},{"type":"text","text":"s","cache_control":{}}],
            "tools":[{"name":"a","cache_control":{}},{"cache_control":{},"name":"b"}],"messages":[{"role":"user","content":[{"type":"text","text":"x","cache_control":{}}]}]}"#;
        let out = stripped(ALL, body).unwrap();
        let digest = |body: &str| read(Api::Messages, body.as_bytes(), &()).unwrap().layout().digest();
        assert_eq!(digest(body), digest(&out));
        serde_json::from_str::<serde_json::Value>(&out).unwrap();
    }
}
