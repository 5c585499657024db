//! The pool of real KV bytes: slots of one block, and which slot holds which block.
//!
//! The ledger decides what is held; the pool follows it. A slot lives while the index (what sessions hold) or
//! a running turn holds it, and there are never more slots than the pool has.

use std::collections::HashSet;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::core::types::BlockHash;

use super::model::KvBytes;

/// A running turn's hold on one slot. It goes back by [`Pool::release`].
#[derive(Debug)]
pub struct Slot {
    id: u32,
    bytes: KvBytes,
}

impl Slot {
    /// The KV in it.
    pub fn bytes(&self) -> &KvBytes {
        &self.bytes
    }
}

#[derive(Debug)]
struct Stored {
    bytes: KvBytes,
    holds: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Pool {
    capacity: usize,
    slots: Vec<Option<Stored>>,
    free: Vec<u32>,
    index: HashMap<BlockHash, u32>,
}

impl Pool {
    /// An empty pool of `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, slots: Vec::new(), free: Vec::new(), index: HashMap::new() }
    }

    /// Blocks it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Slots in use.
    pub fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Holds the slot of a block that sessions hold.
    pub fn hold(&mut self, block: BlockHash) -> Option<Slot> {
        let id = *self.index.get(&block)?;
        let stored = self.slots.get_mut(id as usize)?.as_mut()?;
        stored.holds += 1;
        Some(Slot { id, bytes: stored.bytes.clone() })
    }

    /// The KV of a block that sessions hold.
    pub fn bytes(&self, block: BlockHash) -> Option<&KvBytes> {
        let id = *self.index.get(&block)?;
        self.slots.get(id as usize)?.as_ref().map(|stored| &stored.bytes)
    }

    /// Puts bytes into a free slot. `None` when there is none.
    pub fn store(&mut self, bytes: KvBytes) -> Option<Slot> {
        let stored = Some(Stored { bytes: bytes.clone(), holds: 1 });
        let id = match self.free.pop() {
            Some(id) => {
                self.slots[id as usize] = stored;
                id
            }
            None if self.slots.len() < self.capacity => {
                self.slots.push(stored);
                (self.slots.len() - 1) as u32
            }
            None => return None,
        };
        Some(Slot { id, bytes })
    }

    /// Makes a turn's slot the slot of `block`, unless the block has one.
    pub fn adopt(&mut self, block: BlockHash, slot: &Slot) {
        if let Entry::Vacant(entry) = self.index.entry(block) {
            entry.insert(slot.id);
            if let Some(stored) = &mut self.slots[slot.id as usize] {
                stored.holds += 1;
            }
        }
    }

    /// Nobody holds the block any more: its slot goes when the last running turn leaves it.
    pub fn forget(&mut self, block: BlockHash) {
        if let Some(id) = self.index.remove(&block) {
            self.unhold(id);
        }
    }

    /// Takes back a turn's hold.
    pub fn release(&mut self, slot: Slot) {
        let Slot { id, bytes } = slot;
        drop(bytes);
        self.unhold(id);
    }

    fn unhold(&mut self, id: u32) {
        let Some(entry) = self.slots.get_mut(id as usize) else { return };
        let Some(stored) = entry else { return };
        stored.holds -= 1;
        if stored.holds == 0 {
            *entry = None;
            self.free.push(id);
        }
    }

    /// Fault injection: spoils one byte of a stored block. Returns whether the block is there.
    pub fn poison(&mut self, block: BlockHash) -> bool {
        let stored = self.index.get(&block).and_then(|id| self.slots[*id as usize].as_mut());
        stored.is_some_and(|stored| {
            let mut bytes = stored.bytes.to_vec();
            bytes.iter_mut().take(1).for_each(|byte| *byte ^= 1);
            stored.bytes = bytes.into();
            true
        })
    }

    /// Checks the books: the index has `blocks` blocks, those of the chains (`held`) among them, and every slot is
    /// accounted for exactly once by it and by the `running` holds of turns.
    ///
    /// # Errors
    /// A sentence that says what does not add up.
    pub fn audit(&self, held: &HashSet<BlockHash>, blocks: usize, running: usize) -> Result<(), String> {
        let missing = held.iter().filter(|block| !self.index.contains_key(*block)).count();
        if missing > 0 || self.index.len() != blocks {
            let indexed = self.index.len();
            return Err(format!(
                "{indexed} blocks with a slot, {blocks} held; {missing} of chains without one"
            ));
        }
        let distinct: HashSet<u32> = self.index.values().copied().collect();
        if distinct.len() != self.index.len() {
            return Err("two blocks share a slot".into());
        }
        let free: HashSet<u32> = self.free.iter().copied().collect();
        let empty = self.slots.iter().filter(|s| s.is_none()).count();
        if free.len() != self.free.len() || free.len() != empty {
            return Err(format!("{} free slots listed, {empty} empty", self.free.len()));
        }
        let holds: usize = self.slots.iter().flatten().map(|s| s.holds as usize).sum();
        if holds != self.index.len() + running {
            let index = self.index.len();
            return Err(format!("{holds} holds on slots, {index} by the index and {running} by turns"));
        }
        if self.used() > self.capacity {
            return Err(format!("{} slots used of {}", self.used(), self.capacity));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(n: u8) -> KvBytes {
        vec![n; 8].into()
    }

    #[test]
    fn a_slot_lives_until_index_and_turns_let_go() {
        let mut pool = Pool::new(2);
        let a = pool.store(kv(1)).unwrap();
        pool.adopt(BlockHash(1), &a);
        let again = pool.hold(BlockHash(1)).unwrap();
        assert_eq!(pool.used(), 1);
        pool.release(a);
        pool.forget(BlockHash(1));
        assert_eq!((pool.used(), pool.hold(BlockHash(1)).is_none()), (1, true));
        assert_eq!(**again.bytes(), *kv(1));
        pool.release(again);
        assert_eq!(pool.used(), 0);
        pool.audit(&HashSet::new(), 0, 0).unwrap();
    }

    #[test]
    fn never_more_slots_than_the_pool_has() {
        let mut pool = Pool::new(2);
        let a = pool.store(kv(1)).unwrap();
        let b = pool.store(kv(2)).unwrap();
        assert!(pool.store(kv(3)).is_none());
        pool.release(a);
        assert!(pool.store(kv(3)).is_some());
        pool.release(b);
    }

    #[test]
    fn of_two_equal_blocks_the_first_stays() {
        let mut pool = Pool::new(4);
        let (a, b) = (pool.store(kv(1)).unwrap(), pool.store(kv(1)).unwrap());
        pool.adopt(BlockHash(1), &a);
        pool.adopt(BlockHash(1), &b);
        pool.release(b);
        pool.release(a);
        assert_eq!(pool.used(), 1);
        pool.audit(&HashSet::from([BlockHash(1)]), 1, 0).unwrap();
        assert!(pool.audit(&HashSet::new(), 0, 0).is_err());
        assert!(pool.audit(&HashSet::from([BlockHash(2)]), 1, 0).is_err());
        assert!(pool.audit(&HashSet::from([BlockHash(1)]), 1, 1).is_err());
    }
}
