//! Which lane a request continues: the best evidence first.

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::prompt::{ItemKind, Layout, Prompt};

use super::class::Class;
use super::identity::Strength;
use super::lane::Lane;
use super::minted::Minted;
use super::store::Store;
use super::tails::{TailIndex, affine, of_request};
use super::turn::How;

/// The newest tool-call ids of a request that are looked up.
const CALLS: usize = 16;
/// Groups looked at for an anonymous request.
const HEADS: usize = 24;

/// A lane found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Match {
    pub at: u32,
    pub how: How,
    /// Items shared with the lane.
    pub common: usize,
}

/// What lineage is asked.
pub(super) struct Query<'a> {
    pub scope: u64,
    pub strength: Strength,
    /// Names of the groups to look in, the request's own first.
    pub groups: &'a [String],
    pub prompt: &'a Prompt<'a>,
    /// A declared side class.
    pub side: Option<Class>,
    /// Whether it is a sub-agent's.
    pub subagent: bool,
    /// The lane whose state the request continues.
    pub owner: Option<u32>,
}

/// The digest that a tool-call or response id is indexed under.
pub(super) fn minted_key(scope: u64, kind: u64, id: u64) -> u64 {
    xxh3_64_with_seed(&id.to_le_bytes(), scope ^ kind)
}

/// Kinds of minted ids.
pub(super) const CALL: u64 = 1;
pub(super) const RESPONSE: u64 = 2;

impl Query<'_> {
    /// The lane the request continues.
    pub fn find(&self, store: &Store, minted: &Minted, tails: &TailIndex) -> Option<Match> {
        self.owned(store)
            .or_else(|| self.prefix(store))
            .or_else(|| self.called(store, minted))
            .or_else(|| self.tail(store, tails))
            .or_else(|| self.rewrite(store))
    }

    /// `previous_response_id` or `conversation`.
    fn owned(&self, store: &Store) -> Option<Match> {
        let at = self.owner?;
        let common = store.get(at)?.print.items as usize;
        Some(Match { at, how: How::PrevId, common })
    }

    /// All lanes the request may belong to by its id or its beginning.
    fn lanes<'s>(&'s self, store: &'s Store) -> impl Iterator<Item = (u32, &'s Lane)> {
        let all = self.groups.iter().flat_map(|name| store.lanes(name));
        all.filter(|(_, lane)| lane.side() == self.side)
    }

    /// Those of them whose prompt may have been rewritten into the request's: a client that marks its sub-agents may
    /// let them share its id, tools and system.
    fn kin<'s>(&'s self, store: &'s Store) -> impl Iterator<Item = (u32, &'s Lane)> {
        self.lanes(store).filter(|(_, lane)| (lane.class == Class::Subagent) == self.subagent)
    }

    /// The longest lane that is a prefix of the request, or equal to it.
    fn prefix(&self, store: &Store) -> Option<Match> {
        let own = self.prompt.layout();
        let begins = |items: usize, bytes: u64, digest: u64| {
            let whole = bytes == own.bytes();
            self.prompt.starts_with(items, bytes, digest).then_some((bytes, items, whole))
        };
        let longest = |lane: &Lane| {
            let at_rest = begins(lane.print.items as usize, lane.print.bytes.into(), lane.print.digest);
            let live = lane.layouts().filter_map(|l| begins(l.items.len(), l.bytes(), l.digest()));
            live.chain(at_rest).max()
        };
        let found = self.lanes(store).filter_map(|(at, lane)| Some((longest(lane)?, lane.used, at)));
        let ((_, items, whole), _, at) = found.max()?;
        Some(Match { at, how: if whole { How::Retry } else { How::Extend }, common: items })
    }

    /// The lane whose newest tool-call id the request echoes.
    fn called(&self, store: &Store, minted: &Minted) -> Option<Match> {
        if self.side.is_some() {
            return None;
        }
        let ids = self.prompt.calls.iter().rev().take(CALLS);
        ids.filter_map(|&id| minted.get(minted_key(self.scope, CALL, id))).find_map(|(lane, commit)| {
            let at = store.resolve(lane)?;
            let lane = store.get(at)?;
            let ours = match self.strength {
                Strength::None => lane.group().contains("/anon-"),
                _ => self.groups.iter().any(|name| name == lane.group()),
            };
            (ours && lane.minted == commit && lane.side().is_none()).then(|| Match {
                at,
                how: How::CallId,
                common: common(lane, self.prompt.layout()),
            })
        })
    }

    /// A lane of which at most two trailing items differ.
    fn tail(&self, store: &Store, tails: &TailIndex) -> Option<Match> {
        let mut found: Option<(usize, u64, u32)> = None;
        let mut consider = |at: u32, lane: &Lane| {
            if let Some(common) = self.tail_of(lane) {
                found = found.max(Some((common, lane.used, at)));
            }
        };
        for (at, lane) in self.kin(store) {
            consider(at, lane);
        }
        if self.strength == Strength::None && self.side.is_none() {
            for digest in of_request(self.prompt.layout(), self.scope) {
                for at in tails.get(digest) {
                    if let Some(lane) = store.get(at) {
                        consider(at, lane);
                    }
                }
            }
        }
        let (common, _, at) = found?;
        Some(Match { at, how: How::TailRewrite, common })
    }

    fn tail_of(&self, lane: &Lane) -> Option<usize> {
        let own = self.prompt.layout();
        let (seen, common) = lane
            .layouts()
            .map(|layout| (layout, layout.common(own)))
            .filter(|(layout, common)| layout.items.len() - common <= 2)
            .max_by_key(|&(_, common)| common)?;
        let head = seen.head();
        let enough = match self.strength {
            // One id, one conversation: what stands before it must be the same.
            Strength::Exact => common >= head,
            // Others share tools and system too: something of the conversation must be the same.
            _ => common > head || (common == head && lane.committed && affine(lane, self.prompt)),
        };
        (common >= 1 && enough).then_some(common)
    }

    /// Exact ids only: the lane used last that has the same system and tools.
    fn rewrite(&self, store: &Store) -> Option<Match> {
        let own = self.prompt.layout();
        if self.strength != Strength::Exact {
            return None;
        }
        let head = head_digest(own);
        let same = self.kin(store).filter(|(_, lane)| lane.head == head);
        let (at, lane) = same.max_by_key(|(_, lane)| (lane.committed, lane.used))?;
        Some(Match { at, how: How::Rewrite, common: common(lane, own).max(own.head()) })
    }
}

/// The digest of tools and leading system text; 0 without them.
pub(super) fn head_digest(layout: &Layout) -> u64 {
    layout.digest_of(layout.head()).unwrap_or(0)
}

/// How many items a lane shares with a prompt, as far as the lane remembers.
pub(super) fn common(lane: &Lane, layout: &Layout) -> usize {
    let live = lane.layouts().map(|own| own.common(layout)).max();
    live.unwrap_or_else(|| {
        let whole = layout.digest_of(lane.print.items as usize) == Some(lane.print.digest);
        match whole {
            true => lane.print.items as usize,
            false if head_digest(layout) == lane.head => layout.head(),
            false => 0,
        }
    })
}

/// The beginnings that may name an anonymous conversation, the longest first: a new lane is filed under the first.
pub(super) fn anonymous_heads(prompt: &Prompt<'_>) -> SmallVec<[u64; 4]> {
    if prompt.bare {
        // A bare text grows within its item: its beginnings at powers of two.
        let bytes = prompt.layout().bytes().max(1);
        let powers = (6..=bytes.ilog2()).rev().filter_map(|power| prompt.digest_at(1 << power));
        let mut heads: SmallVec<_> = powers.take(HEADS).collect();
        if heads.is_empty() {
            heads.push(prompt.layout().digest());
        }
        return heads;
    }
    let items = &prompt.layout().items;
    let head = prompt.layout().head();
    let users = items[head..].iter().take_while(|item| item.kind == ItemKind::User).count();
    let ends = (head + 1..=head + users.max(1)).rev().take(HEADS);
    let mut heads: SmallVec<_> = ends.filter_map(|end| prompt.layout().digest_of(end)).collect();
    if heads.is_empty() {
        heads.push(prompt.layout().digest());
    }
    heads
}
