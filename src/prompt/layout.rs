//! A prompt once read: where its items end, its block chain, and how to go on from there.

use std::sync::Arc;

use crate::core::types::BlockHash;

use super::canonical::{Bound, ItemKind};
use super::chain::{BLOCK_BYTES, ChainState};

/// One item of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// The digest of the prompt up to and including this item: equal digests mean equal prefixes.
    pub digest: u64,
    /// Canonical bytes up to here.
    pub end: u32,
    /// Images, files and sounds up to here.
    pub media: u16,
    /// Who it comes from.
    pub kind: ItemKind,
}

/// Items, chain and size of a canonical prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The items, in template order.
    pub items: Vec<Item>,
    /// `H`: one hash for each whole block.
    pub chain: Arc<[BlockHash]>,
    /// Where the chain stands after the last item.
    pub state: ChainState,
}

impl Layout {
    /// Canonical bytes of the prompt.
    pub const fn bytes(&self) -> u64 {
        self.state.bytes()
    }

    /// Images, files and sounds in the prompt.
    pub fn media(&self) -> u64 {
        self.items.last().map_or(0, |item| item.media.into())
    }

    /// The digest of the whole prompt.
    pub fn digest(&self) -> u64 {
        self.state.digest()
    }

    /// The digest of the first `count` items.
    pub fn digest_of(&self, count: usize) -> Option<u64> {
        self.items.get(count.checked_sub(1)?).map(|item| item.digest)
    }

    /// How many items stand before the conversation: tools and leading system text.
    pub fn head(&self) -> usize {
        self.items.iter().take_while(|item| matches!(item.kind, ItemKind::Tools | ItemKind::System)).count()
    }

    /// Whether the prompt defines tools.
    pub fn has_tools(&self) -> bool {
        self.items.first().is_some_and(|item| item.kind == ItemKind::Tools)
    }

    /// How many leading items two prompts share.
    pub fn common(&self, other: &Self) -> usize {
        // Digests cover all before them, so equality is a prefix property: bisect.
        let (mut low, mut high) = (0, self.items.len().min(other.items.len()));
        while low < high {
            let mid = (low + high).div_ceil(2);
            if self.items[mid - 1].digest == other.items[mid - 1].digest {
                low = mid;
            } else {
                high = mid - 1;
            }
        }
        low
    }

    /// How many leading blocks two prompts share.
    pub fn common_blocks(&self, other: &Self) -> usize {
        let (mut low, mut high) = (0, self.chain.len().min(other.chain.len()));
        while low < high {
            let mid = (low + high).div_ceil(2);
            if self.chain[mid - 1] == other.chain[mid - 1] {
                low = mid;
            } else {
                high = mid - 1;
            }
        }
        low
    }
}

/// A layout in the making.
pub(crate) struct Builder {
    items: Vec<Item>,
    /// The chain it goes on with, and how many blocks of that.
    known: Option<(Arc<[BlockHash]>, usize)>,
    /// The blocks behind.
    hashes: Vec<BlockHash>,
    state: ChainState,
    media: u32,
}

impl Builder {
    pub fn new(model: &str, bytes: usize, items: usize) -> Self {
        Self {
            items: Vec::with_capacity(items),
            known: None,
            hashes: Vec::with_capacity(bytes / BLOCK_BYTES),
            state: ChainState::root(model),
            media: 0,
        }
    }

    /// Goes on behind the first items of a known layout.
    pub fn resume(layout: &Layout, items: usize, state: ChainState, more: usize) -> Self {
        let hashes = Vec::with_capacity(more / BLOCK_BYTES + 1);
        let items = layout.items[..items].to_vec();
        let media = items.last().map_or(0, |item| item.media.into());
        Self { items, known: Some((layout.chain.clone(), state.blocks())), hashes, state, media }
    }

    /// Appends items; `each` sees the state after every one.
    pub fn extend(&mut self, buf: &[u8], bounds: &[Bound], mut each: impl FnMut(usize, ChainState)) {
        let (mut from, before) = (0, self.media);
        for (i, bound) in bounds.iter().enumerate() {
            self.state.extend(&mut self.hashes, &buf[from..bound.end]);
            from = bound.end;
            self.media = before + bound.media;
            self.items.push(Item {
                digest: self.state.digest(),
                end: u32::try_from(self.state.bytes()).unwrap_or(u32::MAX),
                media: u16::try_from(self.media).unwrap_or(u16::MAX),
                kind: bound.kind,
            });
            each(i, self.state);
        }
    }

    pub fn finish(self) -> Layout {
        let known = self.known.as_ref().map_or(&[][..], |(chain, blocks)| &chain[..*blocks]);
        // One allocation, whatever the length.
        let chain = known.iter().chain(&self.hashes).copied().collect();
        Layout { items: self.items, chain, state: self.state }
    }
}
