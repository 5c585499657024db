//! A request body once read.

use super::api::Api;
use super::canonical::Bound;
use super::chain::{BLOCK_BYTES, ChainState, digest_of};
use super::fields::Fields;
use super::known::Known;
use super::layout::{Builder, Layout};

/// A body, read.
#[derive(Debug)]
pub struct Prompt<'a> {
    /// The API it was read for.
    pub api: Api,
    /// What it says besides the prompt.
    pub fields: Fields<'a>,
    /// The prompt, and what a later turn may skip.
    pub known: Known,
    /// Digests of the tool-call ids of the part that was read, in order.
    pub calls: Vec<u64>,
    /// Where the messages begin in the body (after the `[`), when they are an array.
    pub array_at: Option<usize>,
    /// The canonical bytes of the messages that were read; they begin at `text_at` of the canonical prompt.
    pub text: Vec<u8>,
    /// Canonical bytes before `text`.
    pub text_at: u64,
    /// Whether the prompt is a bare text (`/v1/completions`), which grows within its one item.
    pub bare: bool,
}

impl Prompt<'_> {
    /// The prompt's items and chain.
    pub fn layout(&self) -> &Layout {
        &self.known.layout
    }

    /// Whether the prompt begins with one of `items` items and `bytes` canonical bytes that has this digest.
    pub fn starts_with(&self, items: usize, bytes: u64, digest: u64) -> bool {
        if self.bare {
            self.digest_at(bytes) == Some(digest)
        } else {
            self.layout().digest_of(items) == Some(digest)
        }
    }

    /// The digest of the first `bytes` bytes of a bare prompt.
    pub fn digest_at(&self, bytes: u64) -> Option<u64> {
        let bytes = usize::try_from(bytes).ok().filter(|_| self.bare)?;
        let whole = bytes / BLOCK_BYTES;
        let last = match whole.checked_sub(1) {
            Some(block) => self.layout().chain.get(block)?.0,
            None => ChainState::root(&self.fields.model).digest_seed(),
        };
        let tail = self.text.get(whole * BLOCK_BYTES..bytes)?;
        Some(digest_of(tail, last))
    }

    /// The canonical bytes of an item, if it was read and not skipped.
    pub fn item(&self, index: usize) -> Option<&[u8]> {
        let items = &self.layout().items;
        let start = index.checked_sub(1).map_or(Some(0), |i| Some(u64::from(items.get(i)?.end)))?;
        let end = u64::from(items.get(index)?.end);
        let at = |byte: u64| usize::try_from(byte.checked_sub(self.text_at)?).ok();
        self.text.get(at(start)?..at(end)?)
    }

    /// This body's messages behind another prompt: the whole prompt when the body carries only what is new.
    pub fn onto(&self, before: &Layout) -> Layout {
        let own = self.layout();
        let new = own.items.iter().filter(|item| u64::from(item.end) > self.text_at);
        let bounds: Vec<Bound> = new
            .map(|item| Bound {
                end: (u64::from(item.end) - self.text_at) as usize,
                kind: item.kind,
                media: item.media.into(),
            })
            .collect();
        let mut builder = Builder::resume(before, before.items.len(), before.state, self.text.len());
        builder.extend(&self.text, &bounds, |_, _| {});
        builder.finish()
    }
}
