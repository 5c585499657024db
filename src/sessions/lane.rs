//! One growing prompt, and what is remembered of it.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::core::types::{BlockHash, Millis, SessionId};
use crate::prompt::{Known, Layout};

use super::class::Class;
use super::estimate::{Estimate, Size};

/// No lane: the end of a list.
pub(super) const NIL: u32 = u32::MAX;

/// A prompt by its length and digest: enough to see it extended or repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Print {
    pub digest: u64,
    pub items: u32,
    pub bytes: u32,
}

impl Print {
    pub fn of(layout: &Layout) -> Self {
        Self {
            digest: layout.digest(),
            items: u32::try_from(layout.items.len()).unwrap_or(u32::MAX),
            bytes: u32::try_from(layout.bytes()).unwrap_or(u32::MAX),
        }
    }
}

/// What only a lane in use needs; dropped at rest, since the prompt comes again.
#[derive(Debug)]
pub(super) struct Live {
    /// The prompt seen last, and what its extension may skip.
    pub seen: Known,
    /// The newest prompt that came whole, by the digest of its head and its chain: what is certain of one that a
    /// delta with the same head continues.
    pub whole: Option<(u64, Arc<[BlockHash]>)>,
    /// The prompt of the last success.
    pub committed: Option<Arc<Layout>>,
    /// The lane it was forked from, or the parent the client named.
    pub parent: Option<Arc<str>>,
    /// Hints that lead here.
    pub hints: SmallVec<[u64; 2]>,
    /// Where the lane is filed for anonymous rewrites.
    pub tails: super::tails::Tails,
    /// Both ends of its last message; see [`super::tails`].
    pub edges: Box<[u8]>,
}

/// A lane. Everything here is kept at rest too: about 100 bytes beside the session's id.
#[derive(Debug)]
pub(super) struct Lane {
    pub session: SessionId,
    /// The last success, or what was seen when there is none.
    pub print: Print,
    /// Digest of tools and leading system text; 0 without them.
    pub head: u64,
    pub used: Millis,
    pub live: Option<Box<Live>>,
    pub estimate: Estimate,
    /// Committed turns.
    pub turns: u32,
    /// The commit that minted the newest tool-call ids.
    pub minted: u32,
    pub next_in_group: u32,
    pub older: u32,
    pub newer: u32,
    pub number: u32,
    /// How many lanes were in this one's place before.
    pub generation: u32,
    /// Bytes of `session` that name the group.
    pub group_len: u16,
    pub class: Class,
    /// The client declared the class: lineage doesn't change it.
    pub declared: bool,
    pub tools: bool,
    /// Small and new: nothing has extended it yet.
    pub ephemeral: bool,
    pub committed: bool,
}

impl Lane {
    /// `scope/key`, the name of the lane's group.
    pub fn group(&self) -> &str {
        &self.session.as_str()[..usize::from(self.group_len)]
    }

    /// A side class that the client declared; such lanes match only requests that declare the same.
    pub fn side(&self) -> Option<Class> {
        Some(self.class).filter(|class| self.declared && class.is_side())
    }

    /// The prompts this lane is known by.
    pub fn layouts(&self) -> impl Iterator<Item = &Layout> {
        let live = self.live.as_deref();
        let committed = live.and_then(|live| live.committed.as_deref());
        live.map(|live| &*live.seen.layout).into_iter().chain(committed)
    }

    /// The layout of the last success, while it is in memory.
    pub fn committed_layout(&self) -> Option<&Arc<Layout>> {
        self.live.as_deref()?.committed.as_ref()
    }
}

/// The size of the first `items` of a prompt.
pub(super) fn size_of(layout: &Layout, items: usize) -> Size {
    items
        .checked_sub(1)
        .and_then(|last| layout.items.get(last))
        .map_or(Size::default(), |item| Size { bytes: item.end.into(), media: item.media.into() })
}
