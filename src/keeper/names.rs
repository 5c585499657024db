//! Which of the router's blocks an engine's blocks are. Engines hash blocks in their own way and size; but they say which
//! tokens each block has and which block it follows, and the router's chain over tokens follows from that
//! ([`TokenChain`]). So a block the engine drops is a block the books can drop, and no other.
//!
//! Only with exact tokens (`sessions.tokens = "tokens"`): a chain over bytes has no tokens to compare.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::core::types::BlockHash;
use crate::prompt::BLOCK_TOKENS;
use crate::tokens::TokenChain;

/// Most engine blocks that are known by name. An engine with more has blocks of a token or a pool of the size of a house;
/// its books then follow `usage` and the count alone.
const MOST: usize = 400_000;
/// How long a dropped block may still be stored again by an event on its way: a turn that has ended may have brought it
/// back before the engine's events tell of either.
const LATE: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub struct Names {
    root: TokenChain,
    known: HashMap<u64, Named>,
    /// What was dropped and not stored again, since when.
    gone: HashMap<BlockHash, Instant>,
    overfull: bool,
}

/// An engine's block.
#[derive(Debug)]
struct Named {
    parent: Option<u64>,
    /// Tokens before it.
    start: u64,
    /// The chain behind its last token.
    end: TokenChain,
    /// The router's blocks that have tokens in it.
    touches: Vec<BlockHash>,
}

impl Names {
    /// For the prompts of a model.
    pub fn new(model: &str) -> Self {
        Self { root: TokenChain::root(model), known: HashMap::new(), gone: HashMap::new(), overfull: false }
    }

    /// Blocks are stored, one behind the other, the first behind `parent` (`None`: it begins a prompt).
    pub fn stored(&mut self, parent: Option<u64>, hashes: &[u64], ids: &[u32], block: usize) {
        if block == 0 || ids.len() != hashes.len() * block || self.overfull {
            return;
        }
        if self.known.len() + hashes.len() > MOST {
            *self = Self { root: self.root, known: HashMap::new(), gone: HashMap::new(), overfull: true };
            return;
        }
        let mut parent = parent;
        for (hash, ids) in hashes.iter().zip(ids.chunks_exact(block)) {
            let before = match parent {
                None => self.root,
                // Of a parent nobody has heard of nothing follows.
                Some(parent) => match self.known.get(&parent) {
                    Some(named) => named.end,
                    None => return,
                },
            };
            self.store(*hash, parent, before, ids);
            parent = Some(*hash);
        }
    }

    fn store(&mut self, hash: u64, parent: Option<u64>, before: TokenChain, ids: &[u32]) {
        let (mut end, mut touches) = (before, Vec::new());
        end.extend(&mut touches, ids);
        for block in &touches {
            self.gone.remove(block);
        }
        // The first one completed here may have begun in blocks before.
        if let Some(&first) = touches.first() {
            let begins = before.tokens() / BLOCK_TOKENS as u64 * BLOCK_TOKENS as u64;
            let mut above = parent.filter(|_| begins < before.tokens());
            while let Some(named) = above.and_then(|hash| self.known.get_mut(&hash)) {
                if !named.touches.contains(&first) {
                    named.touches.push(first);
                }
                above = named.parent.filter(|_| named.start > begins);
            }
        }
        self.known.insert(hash, Named { parent, start: before.tokens(), end, touches });
    }

    /// Blocks are dropped.
    pub fn removed(&mut self, hashes: impl Iterator<Item = u64>) {
        let now = Instant::now();
        for named in hashes.filter_map(|hash| self.known.remove(&hash)) {
            self.gone.extend(named.touches.into_iter().map(|block| (block, now)));
        }
    }

    /// Everything is dropped.
    pub fn cleared(&mut self) {
        self.known.clear();
        self.gone.clear();
        self.overfull = false;
    }

    /// The router's blocks that the engine has dropped for good.
    pub fn lost(&mut self) -> HashSet<BlockHash> {
        let mut lost = HashSet::new();
        self.gone.retain(|block, since| {
            let late = since.elapsed() < LATE;
            if !late {
                lost.insert(*block);
            }
            late
        });
        lost
    }

    /// Engine blocks known by name.
    pub fn count(&self) -> usize {
        self.known.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The router's blocks of these tokens.
    fn chain(ids: &[u32]) -> Vec<BlockHash> {
        let (mut chain, mut hashes) = (TokenChain::root("m"), Vec::new());
        chain.extend(&mut hashes, ids);
        hashes
    }

    fn ids(from: u32, count: u32) -> Vec<u32> {
        (from..from + count).collect()
    }

    async fn lost_of(names: &mut Names) -> HashSet<BlockHash> {
        tokio::time::advance(LATE).await;
        names.lost()
    }

    /// Blocks of 16 tokens against ours of 24: the second and third of theirs share our second.
    #[tokio::test(start_paused = true)]
    async fn whatever_has_a_token_in_a_dropped_block_is_lost() {
        let (prompt, mut names) = (ids(0, 96), Names::new("m"));
        let ours = chain(&prompt);
        names.stored(None, &[1, 2, 3, 4, 5, 6], &prompt, 16);
        assert_eq!((ours.len(), names.count()), (4, 6));
        names.removed([6].into_iter());
        assert!(names.lost().is_empty(), "its tokens may be on their way back");
        assert_eq!(lost_of(&mut names).await, HashSet::from([ours[3]]));
        names.removed([2].into_iter());
        assert_eq!(lost_of(&mut names).await, HashSet::from([ours[0], ours[1]]));
        names.removed([1, 9].into_iter());
        assert_eq!(lost_of(&mut names).await, HashSet::from([ours[0]]));
    }

    /// Blocks of 64: each has several of ours; and blocks of one token.
    #[tokio::test(start_paused = true)]
    async fn any_size_of_block_is_mapped() {
        let (prompt, ours) = (ids(7, 128), chain(&ids(7, 128)));
        let mut names = Names::new("m");
        names.stored(None, &[1], &prompt[..64], 64);
        names.stored(Some(1), &[2], &prompt[64..], 64);
        names.removed([2].into_iter());
        assert_eq!(lost_of(&mut names).await, ours[2..].iter().copied().collect());
        let mut names = Names::new("m");
        let hashes: Vec<u64> = (0..128).collect();
        names.stored(None, &hashes, &prompt, 1);
        names.removed([30].into_iter());
        assert_eq!(lost_of(&mut names).await, HashSet::from([ours[1]]));
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_back_in_time_was_never_lost() {
        let (prompt, mut names) = (ids(0, 48), Names::new("m"));
        names.stored(None, &[1, 2, 3], &prompt, 16);
        names.removed([2, 3].into_iter());
        names.stored(Some(1), &[2, 3], &prompt[16..], 16);
        assert_eq!(lost_of(&mut names).await, HashSet::new());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_understood_is_left_out() {
        let (prompt, mut names) = (ids(0, 48), Names::new("m"));
        names.stored(Some(77), &[1, 2, 3], &prompt, 16);
        names.stored(None, &[1, 2], &prompt, 16);
        names.stored(None, &[1], &[], 0);
        assert_eq!(names.count(), 0);
        names.stored(None, &[1, 2, 3], &prompt, 16);
        names.cleared();
        names.removed([1].into_iter());
        assert_eq!((names.count(), lost_of(&mut names).await.len()), (0, 0));
    }
}
