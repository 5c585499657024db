//! Ids that answers created, and the lanes they belong to.

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::store::LaneRef;

/// Where an id leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    lane: LaneRef,
    /// The commit that minted it: only a lane's newest counts for tool calls.
    commit: u32,
    /// Minted by two lanes: it names neither.
    shared: bool,
}

/// Minted ids by digest (scope and id), oldest dropped first.
#[derive(Debug)]
pub(super) struct Minted {
    map: HashMap<u64, Entry>,
    order: VecDeque<u64>,
    cap: usize,
}

impl Minted {
    pub fn new(cap: usize) -> Self {
        Self { map: HashMap::new(), order: VecDeque::new(), cap }
    }

    /// Records an id. `alive` tells whether a lane still exists.
    pub fn insert(&mut self, id: u64, lane: LaneRef, commit: u32, alive: impl Fn(LaneRef) -> bool) {
        if let Some(entry) = self.map.get_mut(&id) {
            let shared = entry.lane != lane && alive(entry.lane);
            *entry = Entry { lane, commit, shared };
            return;
        }
        while self.order.len() >= self.cap.max(1) {
            if let Some(old) = self.order.pop_front() {
                self.map.remove(&old);
            }
        }
        self.order.push_back(id);
        self.map.insert(id, Entry { lane, commit, shared: false });
    }

    /// The lane an id belongs to alone, and the commit that minted it.
    pub fn get(&self, id: u64) -> Option<(LaneRef, u32)> {
        let entry = self.map.get(&id).filter(|entry| !entry.shared)?;
        Some((entry.lane, entry.commit))
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.map.len()
    }
}
