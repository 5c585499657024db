//! A P's backup tier: KV bytes in host memory, by block, least recently used out first.

use bytes::Bytes;
use hashbrown::HashMap;

use crate::core::staleness::BackupStore;
use crate::core::types::{BlockHash, BlockHashing};

/// What became of blocks offered by a D.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct InsertExternalResult {
    /// Blocks that are new.
    pub inserted: u32,
    /// Blocks that were there already: a no-op.
    pub shared: u32,
    /// Blocks that gave way, of whatever session, these included.
    pub dropped: u32,
}

/// See the module. Nothing in it is pinned: a block being sent is held by its sender.
#[derive(Debug, Default)]
pub struct Tier {
    order: BackupStore,
    bytes: HashMap<BlockHash, Bytes, BlockHashing>,
}

/// What an insertion changed.
#[derive(Debug, Default)]
pub struct Inserted {
    /// For the D.
    pub result: InsertExternalResult,
    /// Blocks held now that were not before.
    pub added: Vec<BlockHash>,
    /// Blocks held before that are not now.
    pub dropped: Vec<BlockHash>,
}

impl Tier {
    /// An empty tier for `blocks` blocks.
    pub fn new(blocks: usize) -> Self {
        Self { order: BackupStore::new(blocks), bytes: HashMap::default() }
    }

    /// Blocks held.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// All blocks held, in no order.
    pub fn blocks(&self) -> Vec<BlockHash> {
        self.bytes.keys().copied().collect()
    }

    /// Whether a block is held.
    pub fn contains(&self, block: BlockHash) -> bool {
        self.bytes.contains_key(&block)
    }

    /// A block's KV.
    pub fn get(&self, block: BlockHash) -> Option<&Bytes> {
        self.bytes.get(&block)
    }

    /// Marks blocks, in the order of their chain, as used now.
    pub fn touch(&mut self, chain: &[BlockHash]) {
        self.order.touch(chain);
    }

    /// `insert_external` of the sync document: blocks in the order they should give way again (a chain's tail
    /// first). What is held already stays as it is.
    pub fn insert_external(&mut self, blocks: Vec<(BlockHash, Bytes)>) -> Inserted {
        let mut inserted = Inserted::default();
        let offered = blocks.len();
        let (_, gone) = self.order.insert_and_drop(blocks.iter().map(|(block, _)| *block));
        for (block, kv) in blocks {
            if self.bytes.contains_key(&block) {
                inserted.result.shared += 1;
            } else if self.order.contains(block) {
                self.bytes.insert(block, own(kv));
                inserted.added.push(block);
            }
        }
        for block in gone {
            // A block may have given way and come back within the batch.
            if !self.order.contains(block) && self.bytes.remove(&block).is_some() {
                inserted.dropped.push(block);
            }
        }
        inserted.result.inserted = inserted.added.len() as u32;
        let refused = offered - inserted.added.len() - inserted.result.shared as usize;
        inserted.result.dropped = (refused + inserted.dropped.len()) as u32;
        inserted
    }

    /// Drops everything; returns what was held.
    pub fn clear(&mut self) -> Vec<BlockHash> {
        let all = self.blocks();
        self.order.remove(&all);
        self.bytes.clear();
        all
    }

    /// Checks bytes against books.
    ///
    /// # Errors
    /// A sentence that says what does not add up.
    pub fn audit(&self) -> Result<(), String> {
        let lost = self.bytes.keys().filter(|block| !self.order.contains(**block)).count();
        if lost > 0 || self.order.len() != self.bytes.len() {
            let (books, kept) = (self.order.len(), self.bytes.len());
            return Err(format!("backup tier: {books} blocks in the books, {kept} kept, {lost} unaccounted"));
        }
        Ok(())
    }
}

/// A block that is a small part of the frame it came in must not keep the whole frame alive.
fn own(kv: Bytes) -> Bytes {
    const SMALL: usize = 64 << 10;
    if kv.len() < SMALL { Bytes::copy_from_slice(&kv) } else { kv }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(blocks: std::ops::Range<u64>) -> Vec<(BlockHash, Bytes)> {
        blocks.rev().map(|b| (BlockHash(b), Bytes::from(vec![b as u8; 4]))).collect()
    }

    #[test]
    fn only_what_diverges_goes_in_and_the_result_says_so() {
        let mut tier = Tier::new(8);
        assert_eq!(tier.insert_external(kv(0..4)).result.inserted, 4);
        let more = tier.insert_external(kv(2..6));
        assert_eq!(more.result, InsertExternalResult { inserted: 2, shared: 2, dropped: 0 });
        assert_eq!(more.added, [BlockHash(5), BlockHash(4)]);
        let over = tier.insert_external(kv(10..15));
        assert_eq!((over.result.inserted, over.result.dropped, tier.len()), (5, 3, 8));
        assert_eq!(over.dropped.len(), 3);
        tier.audit().unwrap();
    }

    #[test]
    fn a_batch_larger_than_the_tier_keeps_its_head() {
        let mut tier = Tier::new(3);
        let all = tier.insert_external(kv(0..5));
        assert_eq!(all.result, InsertExternalResult { inserted: 3, shared: 0, dropped: 2 });
        assert!(all.dropped.is_empty() && tier.contains(BlockHash(0)) && !tier.contains(BlockHash(4)));
        assert_eq!(tier.get(BlockHash(1)).map(|kv| kv[0]), Some(1));
        tier.audit().unwrap();
        assert_eq!(Tier::new(0).insert_external(kv(0..2)).result.inserted, 0);
    }
}
