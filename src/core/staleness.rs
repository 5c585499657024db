//! Backups of KV beside the pools: what a P node (or a fused worker's host) holds in its host-memory tier, and
//! how far it is behind (`staleness(s) = L_D − L_P`).
//!
//! Blocks arrive as D drops them, tail first (`d2p_trigger = evict`), or as a turn commits them (`commit`). They
//! are kept by hash under one LRU, so a prefix shared by sessions is kept once, and a backup that lacks its head
//! is still good for a D that kept it.

use std::collections::VecDeque;

use super::types::{BlockHash, BlockHashing};

/// A host-memory tier: at most `capacity` blocks, least recently used out first.
#[derive(Debug, Clone, Default)]
pub struct BackupStore {
    blocks: hashbrown::HashMap<BlockHash, u64, BlockHashing>,
    /// Ages, oldest first; an entry whose age is not the block's any more is skipped.
    order: VecDeque<(u64, BlockHash)>,
    clock: u64,
    capacity: usize,
}

impl BackupStore {
    /// An empty store.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Blocks held.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Stores blocks in the order they should be dropped again: a chain's tail before its head. Returns how many
    /// were new, i.e. had to travel.
    pub fn insert(&mut self, blocks: impl IntoIterator<Item = BlockHash>) -> usize {
        self.insert_and_drop(blocks).0
    }

    /// As [`Self::insert`]; also tells which blocks gave way, for whoever keeps their bytes. A block may give way
    /// to others of the same batch.
    pub fn insert_and_drop(
        &mut self,
        blocks: impl IntoIterator<Item = BlockHash>,
    ) -> (usize, Vec<BlockHash>) {
        if self.capacity == 0 {
            return (0, Vec::new());
        }
        let mut new = 0;
        for block in blocks {
            self.clock += 1;
            new += usize::from(self.blocks.insert(block, self.clock).is_none());
            self.order.push_back((self.clock, block));
        }
        (new, self.trim())
    }

    /// Whether a block is held.
    pub fn contains(&self, block: BlockHash) -> bool {
        self.blocks.contains_key(&block)
    }

    /// How many blocks from the front of `missing` are held without a hole: what a D can restore.
    pub fn run(&self, missing: &[BlockHash]) -> usize {
        missing.iter().take_while(|b| self.blocks.contains_key(*b)).count()
    }

    /// Marks blocks as used now (a restore), tail first.
    pub fn touch(&mut self, blocks: &[BlockHash]) {
        for block in blocks.iter().rev() {
            if let Some(age) = self.blocks.get_mut(block) {
                self.clock += 1;
                *age = self.clock;
                self.order.push_back((self.clock, *block));
            }
        }
        self.trim();
    }

    /// Forgets blocks, e.g. because a D holds them again and the room serves others better.
    pub fn remove(&mut self, blocks: &[BlockHash]) {
        for block in blocks {
            self.blocks.remove(block);
        }
        self.trim();
    }

    fn trim(&mut self) -> Vec<BlockHash> {
        let mut dropped = Vec::new();
        while self.blocks.len() > self.capacity {
            let Some((age, block)) = self.order.pop_front() else { break };
            if self.blocks.get(&block) == Some(&age) {
                self.blocks.remove(&block);
                dropped.push(block);
            }
        }
        if self.order.len() > 64 + 4 * self.blocks.len() {
            let blocks = &self.blocks;
            self.order.retain(|(age, block)| blocks.get(block) == Some(age));
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chain(n: std::ops::Range<u64>) -> Vec<BlockHash> {
        n.map(BlockHash).collect()
    }

    #[test]
    fn a_tail_is_restorable_by_a_worker_that_kept_the_head() {
        let mut store = BackupStore::new(10);
        assert_eq!(store.insert(chain(4..9).into_iter().rev()), 5);
        assert_eq!(store.run(&chain(4..12)), 5);
        assert_eq!(store.run(&chain(0..12)), 0);
        assert_eq!(store.insert(chain(0..5).into_iter().rev()), 4);
        assert_eq!(store.run(&chain(0..12)), 9);
    }

    #[test]
    fn the_tail_gives_way_before_the_head_and_the_unused_before_the_used() {
        let mut store = BackupStore::new(6);
        store.insert(chain(0..4).into_iter().rev());
        store.insert(chain(10..14).into_iter().rev());
        assert_eq!((store.run(&chain(0..4)), store.run(&chain(10..14))), (2, 4));
        store.touch(&chain(0..2));
        store.insert(chain(20..24).into_iter().rev());
        assert_eq!((store.run(&chain(0..2)), store.run(&chain(10..14)), store.len()), (2, 0, 6));
        store.remove(&chain(20..24));
        assert_eq!(store.len(), 2);
        assert_eq!(BackupStore::new(0).insert(chain(0..3)), 0);
    }

    proptest! {
        #[test]
        fn never_over_capacity_and_never_a_leaked_age(
            ops in proptest::collection::vec((0u8..3, 0u64..40, 1u64..20), 1..200), capacity in 0usize..50,
        ) {
            let mut store = BackupStore::new(capacity);
            for (what, start, n) in ops {
                let blocks = chain(start..start + n);
                match what {
                    0 => { store.insert(blocks.iter().rev().copied()); }
                    1 => store.touch(&blocks),
                    _ => store.remove(&blocks),
                }
                prop_assert!(store.len() <= capacity);
                prop_assert!(store.order.len() <= 64 + 4 * store.blocks.len());
                for (block, age) in &store.blocks {
                    prop_assert!(store.order.contains(&(*age, *block)));
                }
            }
        }
    }
}
