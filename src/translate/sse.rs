//! The data of server-sent events, whatever pieces they arrive in.

use super::answer::Broken;

/// Longest line that is kept: an engine that sends longer ones is broken.
const LINE_MAX: usize = 16 << 20;

/// Splits a stream into the values of its `data` lines. Chat completions have one line to an event.
#[derive(Debug, Default)]
pub(super) struct Lines {
    line: Vec<u8>,
}

impl Lines {
    /// Takes the next bytes; `each` gets every complete value.
    pub fn feed(
        &mut self,
        mut bytes: &[u8],
        mut each: impl FnMut(&[u8]) -> Result<(), Broken>,
    ) -> Result<(), Broken> {
        while let Some(end) = memchr::memchr2(b'\n', b'\r', bytes) {
            let (head, rest) = bytes.split_at(end);
            bytes = &rest[1..];
            if self.line.is_empty() {
                data(head, &mut each)?;
                continue;
            }
            self.line.extend_from_slice(head);
            let line = std::mem::take(&mut self.line);
            data(&line, &mut each)?;
            self.line = line;
            self.line.clear();
        }
        if self.line.len() + bytes.len() > LINE_MAX {
            return Err(Broken("an event without an end"));
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }
}

fn data(line: &[u8], each: &mut impl FnMut(&[u8]) -> Result<(), Broken>) -> Result<(), Broken> {
    match line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) {
        Some(value) if !value.is_empty() => each(value),
        _ => Ok(()),
    }
}
