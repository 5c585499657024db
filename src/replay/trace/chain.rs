//! From a session's local block ids to chained hashes: equal hash ⇔ equal prefix.
//!
//! The file's ids are local to a session family. A block within the shared system prefix, at the place and with
//! the id the session's first turn had there, is the group's; every other block is the family's own.

use std::sync::Arc;

use serde::Serialize;

use super::{SessionSpec, TurnSpec};
use crate::core::types::{BlockHash, Tokens};

/// Who shares system prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum, Default)]
#[serde(rename_all = "lowercase")]
pub enum SharedPrefix {
    /// Sessions of equal (models, prefix length): the usual model.
    #[default]
    Group,
    /// All sessions: the pile-up test.
    All,
    /// Nobody.
    None,
}

/// The growing chain of one live session. Cheap per turn: only new blocks are hashed.
#[derive(Debug, Clone)]
pub struct Chain {
    group: u64,
    family: u64,
    /// Blocks of the shared prefix.
    shared: usize,
    /// Recorded blocks per replayed block.
    factor: usize,
    first: Option<Vec<u64>>,
    ids: Vec<u64>,
    hashes: Vec<u64>,
}

impl Chain {
    /// The chain of a session before its first turn. `factor` recorded blocks make one replayed block.
    pub fn new(spec: &SessionSpec, sharing: SharedPrefix, trace_block: u32, factor: u32) -> Self {
        let (group, shared) = match sharing {
            SharedPrefix::Group => (spec.group, spec.shared_prefix),
            SharedPrefix::All => (0, spec.shared_prefix),
            SharedPrefix::None => (0, 0),
        };
        Self {
            group,
            family: spec.family,
            shared: (shared / Tokens::from(trace_block)) as usize,
            factor: factor.max(1) as usize,
            first: None,
            ids: Vec::new(),
            hashes: Vec::new(),
        }
    }

    /// Moves to a turn's prompt; returns its whole blocks.
    pub fn advance(&mut self, turn: &TurnSpec) -> Arc<[BlockHash]> {
        let ids: Vec<u64> = turn.runs.iter().flat_map(|&(start, n)| start..start + u64::from(n)).collect();
        let same = ids.iter().zip(&self.ids).take_while(|(a, b)| a == b).count();
        if self.first.is_none() {
            self.first = Some(ids[..self.shared.min(ids.len())].to_vec());
        }
        self.hashes.truncate(same);
        let mut hash = self.hashes.last().copied().unwrap_or(SEED);
        for (place, id) in ids.iter().enumerate().skip(same) {
            let common = self.first.as_ref().is_some_and(|f| f.get(place) == Some(id));
            // `place` is the content of a shared block, `id` that of a private one.
            hash = if common { mix(hash, self.group, place as u64) } else { mix(hash, self.family, *id) };
            self.hashes.push(hash);
        }
        self.ids = ids;
        self.hashes.iter().skip(self.factor - 1).step_by(self.factor).map(|h| BlockHash(*h)).collect()
    }
}

/// The prompt's blocks plus those of its answer, `total` in all: the next prompt repeats the answer where it was
/// kept; blocks that nothing repeats get hashes of their own.
pub fn with_answer(
    prompt: &Arc<[BlockHash]>,
    next: Option<&Arc<[BlockHash]>>,
    total: usize,
    salt: u64,
) -> Arc<[BlockHash]> {
    if total <= prompt.len() {
        return prompt.clone();
    }
    let kept = next.filter(|n| n.get(..prompt.len()) == Some(&**prompt));
    let mut chain: Vec<BlockHash> = match kept {
        Some(next) => next[..total.min(next.len())].to_vec(),
        None => prompt.to_vec(),
    };
    while chain.len() < total {
        let last = chain.last().map_or(SEED, |h| h.0);
        chain.push(BlockHash(mix(last, salt, chain.len() as u64)));
    }
    chain.into()
}

const SEED: u64 = 0x6b76_632d_7265_706c;

/// Two rounds of a 64-bit finaliser: enough that no two of the trace's prefixes collide.
fn mix(hash: u64, scope: u64, item: u64) -> u64 {
    let mut x = hash ^ scope.rotate_left(32) ^ item.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for _ in 0..2 {
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
    }
    x
}
