//! Where lanes live: by group, by age, bounded by count and by time.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

use crate::core::types::Millis;

use super::lane::{Lane, NIL};
use super::slots::{Slot, Slots};

/// A lane that may be gone by the time it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaneRef {
    pub at: u32,
    pub generation: u32,
}

/// All lanes, linked by group and from the newest to the oldest used. Lanes with a live part are the newest ones.
#[derive(Debug)]
pub(super) struct Store {
    slots: Slots,
    free: Vec<u32>,
    groups: HashTable<u32>,
    hasher: DefaultHashBuilder,
    newest: u32,
    oldest: u32,
    oldest_live: u32,
    live: usize,
}

impl Store {
    pub fn new() -> Self {
        Self {
            slots: Slots::default(),
            free: Vec::new(),
            groups: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            newest: NIL,
            oldest: NIL,
            oldest_live: NIL,
            live: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub const fn live(&self) -> usize {
        self.live
    }

    pub fn get(&self, at: u32) -> Option<&Lane> {
        self.slots.get(at)?.lane()
    }

    pub fn get_mut(&mut self, at: u32) -> Option<&mut Lane> {
        self.slots.get_mut(at)?.lane_mut()
    }

    pub fn handle(&self, at: u32) -> LaneRef {
        let generation = self.slots.get(at).map_or(0, Slot::generation);
        LaneRef { at, generation }
    }

    /// The lane behind a reference, unless it is gone.
    pub fn resolve(&self, lane: LaneRef) -> Option<u32> {
        let slot = self.slots.get(lane.at)?;
        (slot.generation() == lane.generation && slot.lane().is_some()).then_some(lane.at)
    }

    /// The newest lane of a group, by its exact name.
    pub fn group(&self, name: &str) -> Option<u32> {
        let hash = self.hasher.hash_one(name);
        let found = self.groups.find(hash, |&at| self.get(at).is_some_and(|lane| lane.group() == name));
        found.copied()
    }

    /// The lanes of a group, the newest made first.
    pub fn lanes(&self, name: &str) -> impl Iterator<Item = (u32, &Lane)> {
        let next = |at: u32| self.get(at).map(|lane| (at, lane));
        std::iter::successors(self.group(name).and_then(next), move |(_, lane)| next(lane.next_in_group))
    }

    pub fn oldest(&self) -> Option<(u32, &Lane)> {
        Some((self.oldest, self.get(self.oldest)?))
    }

    pub fn oldest_live(&self) -> Option<(u32, &Lane)> {
        Some((self.oldest_live, self.get(self.oldest_live)?))
    }

    /// Adds a lane as the newest.
    pub fn insert(&mut self, mut lane: Lane) -> u32 {
        let hash = self.hasher.hash_one(lane.group());
        let before = self.group(lane.group());
        lane.next_in_group = before.unwrap_or(NIL);
        self.live += usize::from(lane.live.is_some());
        let at = self.place(lane);
        match before.and_then(|head| self.groups.find_mut(hash, |&at| at == head)) {
            Some(head) => *head = at,
            None => {
                let (slots, hasher) = (&self.slots, &self.hasher);
                self.groups.insert_unique(hash, at, |&at| rehash(slots, hasher, at));
            }
        }
        self.link(at);
        at
    }

    fn place(&mut self, lane: Lane) -> u32 {
        if let Some(at) = self.free.pop() {
            if let Some(slot) = self.slots.get_mut(at) {
                slot.put(lane);
            }
            return at;
        }
        self.slots.push(lane)
    }

    /// Takes a lane out.
    pub fn remove(&mut self, at: u32) -> Option<Lane> {
        self.unlink(at);
        self.leave_group(at);
        let lane = self.slots.get_mut(at)?.take()?;
        self.live -= usize::from(lane.live.is_some());
        self.free.push(at);
        Some(lane)
    }

    fn leave_group(&mut self, at: u32) {
        let Some(lane) = self.get(at) else { return };
        let (next, hash) = (lane.next_in_group, self.hasher.hash_one(lane.group()));
        let Some(head) = self.group(lane.group()) else { return };
        if head != at {
            let previous = std::iter::successors(Some(head), |&lane| Some(self.get(lane)?.next_in_group))
                .find(|&lane| self.get(lane).is_none_or(|lane| lane.next_in_group == at));
            if let Some(previous) = previous.and_then(|lane| self.get_mut(lane)) {
                previous.next_in_group = next;
            }
        } else if let Ok(entry) = self.groups.find_entry(hash, |&found| found == at) {
            if next == NIL {
                entry.remove();
            } else {
                *entry.into_mut() = next;
            }
        }
    }

    /// Marks a lane as used now, live from here on.
    pub fn touch(&mut self, at: u32, now: Millis) {
        self.unlink(at);
        if let Some(lane) = self.get_mut(at) {
            lane.used = now;
        }
        self.link(at);
    }

    /// Gives a lane its live part, or takes it away (only the oldest live lane may lose it).
    pub fn set_live(
        &mut self,
        at: u32,
        live: Option<Box<super::lane::Live>>,
    ) -> Option<Box<super::lane::Live>> {
        let new = live.is_some();
        let lane = self.get_mut(at)?;
        let old = std::mem::replace(&mut lane.live, live);
        let newer = lane.newer;
        match (old.is_some(), new) {
            (false, true) => {
                self.live += 1;
                if self.oldest_live == NIL {
                    self.oldest_live = at;
                }
            }
            (true, false) => self.live -= 1,
            _ => {}
        }
        if !new && self.oldest_live == at {
            self.oldest_live = newer;
        }
        old
    }

    fn unlink(&mut self, at: u32) {
        let Some(lane) = self.get(at) else { return };
        let (older, newer) = (lane.older, lane.newer);
        if self.oldest_live == at {
            self.oldest_live = newer;
        }
        match self.get_mut(newer) {
            Some(lane) => lane.older = older,
            None => self.newest = older,
        }
        match self.get_mut(older) {
            Some(lane) => lane.newer = newer,
            None => self.oldest = newer,
        }
    }

    fn link(&mut self, at: u32) {
        let head = self.newest;
        let Some(lane) = self.get_mut(at) else { return };
        lane.older = head;
        lane.newer = NIL;
        let live = lane.live.is_some();
        match self.get_mut(head) {
            Some(lane) => lane.newer = at,
            None => self.oldest = at,
        }
        self.newest = at;
        if live && self.oldest_live == NIL {
            self.oldest_live = at;
        }
    }
}

fn rehash(slots: &Slots, hasher: &DefaultHashBuilder, at: u32) -> u64 {
    let lane = slots.get(at).and_then(Slot::lane);
    lane.map_or(0, |lane| hasher.hash_one(lane.group()))
}
