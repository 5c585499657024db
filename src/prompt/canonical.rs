//! The canonical prompt: items in template order, as the bytes both the gateway and the builtin worker hash.
//!
//! An item is a header (`0xFE role \n`), decoded content and an end mark. All marks are bytes that UTF-8 never
//! uses, so no text can imitate a boundary.

use super::error::BadBody;
use super::json::Cursor;

pub(crate) const END: u8 = 0xFF;
pub(crate) const HEADER: u8 = 0xFE;
/// Between two parts of one content.
pub(crate) const PART: u8 = 0xFD;
pub(crate) const CALL: u8 = 0xFC;
pub(crate) const REASON: u8 = 0xFB;
pub(crate) const NAME: u8 = 0xFA;
pub(crate) const MEDIA: u8 = 0xF9;
pub(crate) const RESULT: u8 = 0xF8;

/// What one image (or file, or sound) counts for, in tokens.
pub const MEDIA_TOKENS: u64 = 768;
/// Its canonical bytes: its digest repeated, so that blocks stay in proportion to tokens.
pub const MEDIA_BYTES: usize = MEDIA_TOKENS as usize * super::chain::BYTES_PER_TOKEN;

/// Who an item of the prompt comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ItemKind {
    /// The tool definitions, together.
    Tools,
    /// System or developer text.
    System,
    /// The user's message; in the Messages API tool results too.
    User,
    /// What the model said: text, reasoning, calls.
    Assistant,
    /// A tool's result.
    Tool,
}

/// The end of one item in a [`Writer`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    pub end: usize,
    pub kind: ItemKind,
    /// Images up to here.
    pub media: u32,
}

/// Collects canonical bytes and item boundaries.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    pub buf: Vec<u8>,
    pub bounds: Vec<Bound>,
    pub media: u32,
    /// Ids of tool calls and results, in order; see [`super::ids::CallId`].
    pub calls: Vec<u64>,
    /// Whether the content being written has a part already.
    parted: bool,
    /// Lists open around the content being written.
    pub depth: usize,
    /// Whether that content is the system's: Claude's attribution block is left out there.
    system: bool,
}

impl Writer {
    /// Starts an item.
    pub fn open(&mut self, role: &[u8], kind: ItemKind) {
        self.buf.push(HEADER);
        self.buf.extend_from_slice(role);
        self.buf.push(b'\n');
        self.parted = false;
        self.system = kind == ItemKind::System;
    }

    /// Ends the item.
    pub fn close(&mut self, kind: ItemKind) {
        self.buf.push(END);
        self.bound(kind);
    }

    /// Marks an item that has neither header nor end: a bare prompt.
    pub fn bound(&mut self, kind: ItemKind) {
        self.bounds.push(Bound { end: self.buf.len(), kind, media: self.media });
    }

    /// Starts a part of the content; a plain text follows the header directly.
    pub fn part(&mut self) {
        if self.parted {
            self.buf.push(PART);
        }
        self.parted = true;
    }

    /// A part of its own kind behind `mark`, whatever `inner` writes; nothing at all when that is nothing and
    /// `empty` is false.
    pub fn marked(
        &mut self,
        mark: u8,
        empty: bool,
        inner: impl FnOnce(&mut Self) -> Result<(), BadBody>,
    ) -> Result<(), BadBody> {
        let (start, parted) = (self.buf.len(), self.parted);
        self.part();
        self.buf.push(mark);
        self.parted = false;
        let from = self.buf.len();
        inner(self)?;
        let wrote = self.buf.len() > from;
        self.parted = wrote || empty || parted;
        if !wrote && !empty {
            self.buf.truncate(start);
        }
        Ok(())
    }

    /// A text part, decoded where it stands.
    pub fn text(&mut self, cursor: &mut Cursor<'_>) -> Result<(), BadBody> {
        let (start, parted) = (self.buf.len(), self.parted);
        self.part();
        let from = self.buf.len();
        cursor.string_into(&mut self.buf)?;
        if self.system {
            self.strip_attribution(start, from, parted);
        }
        Ok(())
    }

    /// Claude Code's `x-anthropic-billing-header: …; cch=…;` changes on every request: it is not prompt.
    fn strip_attribution(&mut self, start: usize, from: usize, parted: bool) {
        if !self.buf[from..].starts_with(super::strip::ATTRIBUTION.as_bytes()) {
            return;
        }
        match memchr::memchr(b'\n', &self.buf[from..]) {
            Some(line) => drop(self.buf.drain(from..=from + line)),
            None => {
                self.buf.truncate(start);
                self.parted = parted;
            }
        }
    }
}
