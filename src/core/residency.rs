//! Who holds which blocks: sessions, their chains, and the blocks those chains keep alive.
//!
//! The ledger of a worker and the gateway's mirror of it are both this structure. A block lives as long as
//! some chain (or a pin of a running turn) holds it, and chains shrink from the tail, so no resident block
//! ever has a non-resident parent: the overlap with a prompt is a binary search.

use super::types::{BlockHash, BlockHashing, SessionId, Tokens};

/// What one session holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// Its whole blocks, from the front of the prompt.
    pub chain: Vec<BlockHash>,
    /// Its committed length in tokens: prompt plus output, the partial last block included.
    pub tokens: Tokens,
}

/// A change of what one session holds: cut to `keep` blocks, then extended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The session.
    pub session: SessionId,
    /// Blocks that stay.
    pub keep: u32,
    /// Blocks behind them.
    pub appended: Vec<BlockHash>,
    /// Its length afterwards in tokens; 0 = the session is gone.
    pub tokens: Tokens,
}

/// Sessions and blocks of one worker.
#[derive(Debug, Clone, Default)]
pub struct Residency {
    blocks: hashbrown::HashMap<BlockHash, u32, BlockHashing>,
    sessions: hashbrown::HashMap<SessionId, Held>,
    session_tokens: Tokens,
}

/// Length of the common prefix of two chains: a binary search, since equal hashes mean equal prefixes.
pub fn common_prefix(a: &[BlockHash], b: &[BlockHash]) -> usize {
    let n = a.len().min(b.len());
    let (mut lo, mut hi) = (0, n);
    while lo < hi {
        let mid = lo + (hi - lo) / 2;
        if a[mid] == b[mid] {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    lo
}

impl Residency {
    /// Distinct blocks held.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Line 1 of Algorithm 2: `Σ resident_tokens(s')`. Shared blocks count once per session, as written.
    pub fn session_tokens(&self) -> Tokens {
        self.session_tokens
    }

    /// What a session holds, if anything.
    pub fn get(&self, session: &SessionId) -> Option<&Held> {
        self.sessions.get(session)
    }

    /// All sessions, in no order.
    pub fn sessions(&self) -> impl ExactSizeIterator<Item = (&SessionId, &Held)> {
        self.sessions.iter()
    }

    /// Whether a block is held.
    pub fn contains(&self, block: BlockHash) -> bool {
        self.blocks.contains_key(&block)
    }

    /// Holders (chains and pins) of a block.
    pub fn refs(&self, block: BlockHash) -> u32 {
        self.blocks.get(&block).copied().unwrap_or(0)
    }

    /// Longest held prefix of `chain`, in blocks.
    pub fn prefix(&self, chain: &[BlockHash]) -> usize {
        chain.partition_point(|block| self.contains(*block))
    }

    /// Blocks that `session`'s own chain shares with `chain`.
    pub fn own_prefix(&self, session: &SessionId, chain: &[BlockHash]) -> usize {
        self.sessions.get(session).map_or(0, |held| common_prefix(&held.chain, chain))
    }

    /// Cuts a session's chain to `keep` blocks, extends it, and sets its length. New holders come before
    /// dropped ones, so a block both lose and gain never dies. Returns the blocks nobody holds any more.
    /// A `keep` beyond the chain is cut to it. `tokens == 0` removes the session.
    pub fn set(&mut self, change: &Change) -> Vec<BlockHash> {
        let held = self.sessions.entry(change.session.clone()).or_default();
        let keep = (change.keep as usize).min(held.chain.len());
        for block in &change.appended {
            *self.blocks.entry(*block).or_insert(0) += 1;
        }
        let cut = held.chain.split_off(keep);
        held.chain.extend_from_slice(&change.appended);
        self.session_tokens = self.session_tokens - held.tokens + change.tokens;
        held.tokens = change.tokens;
        let mut dropped = cut;
        if change.tokens == 0
            && let Some(held) = self.sessions.remove(&change.session)
        {
            dropped.extend(held.chain);
        }
        self.unpin(&dropped)
    }

    /// Adds a holder to blocks (a running turn that reuses them). Only held blocks may be pinned.
    pub fn pin(&mut self, blocks: &[BlockHash]) {
        for block in blocks {
            *self.blocks.entry(*block).or_insert(0) += 1;
        }
    }

    /// Takes a holder from blocks; returns those nobody holds any more.
    pub fn unpin(&mut self, blocks: &[BlockHash]) -> Vec<BlockHash> {
        // One allocation: what is dropped is mostly held by nobody else.
        let mut gone = Vec::with_capacity(blocks.len());
        for block in blocks {
            if let hashbrown::hash_map::Entry::Occupied(mut entry) = self.blocks.entry(*block) {
                *entry.get_mut() -= 1;
                if *entry.get() == 0 {
                    entry.remove();
                    gone.push(*block);
                }
            }
        }
        gone
    }
}

/// `|prefix_hashes ∩ resident[d]|` over distinct hashes, by definition (R3 `set`): for recorded states whose
/// hashes form no chain, and the oracle of [`Residency::prefix`].
pub fn intersection(chain: &[BlockHash], resident: &std::collections::HashSet<BlockHash>) -> usize {
    chain.iter().collect::<std::collections::HashSet<_>>().iter().filter(|b| resident.contains(b)).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};

    /// A chain in a binary tree of prompts: block i is the hash of the first i+1 choices.
    fn chain(choices: &[bool]) -> Vec<BlockHash> {
        let mut h = 1u64;
        choices
            .iter()
            .map(|c| {
                h = h.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17) ^ u64::from(*c) ^ 0xABCD;
                BlockHash(h)
            })
            .collect()
    }

    #[test]
    fn shared_blocks_live_until_their_last_holder_goes() {
        let mut r = Residency::default();
        let (a, b) = (SessionId::new("a"), SessionId::new("b"));
        let set = |r: &mut Residency, s: &SessionId, keep, appended: &[BlockHash], tokens| {
            r.set(&Change { session: s.clone(), keep, appended: appended.to_vec(), tokens })
        };
        let (x, y) = (chain(&[true, true, false]), chain(&[true, true, true]));
        set(&mut r, &a, 0, &x, 75);
        set(&mut r, &b, 0, &y, 75);
        assert_eq!((r.blocks(), r.session_tokens()), (4, 150));
        assert_eq!(set(&mut r, &a, 1, &[], 24), vec![x[2]]);
        assert_eq!(set(&mut r, &b, 0, &[], 0), vec![y[1], y[2]]);
        assert_eq!((r.blocks(), r.session_tokens(), r.prefix(&x)), (1, 24, 1));
    }

    proptest! {
        /// The fast paths against their definitions, over random histories.
        #[test]
        fn overlap_equals_the_naive_count(
            ops in proptest::collection::vec(
                (0u8..5, proptest::collection::vec(any::<bool>(), 0..12), 0u32..14), 1..60),
            probe in proptest::collection::vec(any::<bool>(), 0..14),
        ) {
            let mut r = Residency::default();
            let mut truth: HashMap<SessionId, Vec<BlockHash>> = HashMap::new();
            for (who, choices, cut) in ops {
                let session = SessionId::new(format!("s{who}"));
                let wanted = chain(&choices);
                let old = truth.get(&session).cloned().unwrap_or_default();
                let keep = common_prefix(&old, &wanted);
                prop_assert_eq!(keep, old.iter().zip(&wanted).take_while(|(a, b)| a == b).count());
                let keep = keep.min(cut as usize);
                let tokens = wanted.len() as u64 * 24;
                r.set(&Change {
                    session: session.clone(), keep: keep as u32, appended: wanted[keep..].to_vec(), tokens,
                });
                if wanted.is_empty() { truth.remove(&session); } else { truth.insert(session, wanted); }
            }
            let resident: HashSet<_> = truth.values().flatten().copied().collect();
            prop_assert_eq!(r.blocks(), resident.len());
            prop_assert_eq!(r.session_tokens(), truth.values().map(|c| c.len() as u64 * 24).sum::<u64>());
            let probe = chain(&probe);
            prop_assert_eq!(r.prefix(&probe), intersection(&probe, &resident));
            prop_assert_eq!(r.prefix(&probe), probe.iter().take_while(|b| resident.contains(b)).count());
        }
    }
}
