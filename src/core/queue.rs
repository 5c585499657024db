//! The wait queue of turns no D admitted (D5): global, bounded, shortest work first with ageing, a deadline each.

use super::types::{Millis, Tokens};

/// Tokens of priority a turn gains per ms of waiting: about what a P computes in that time, so a long turn is
/// overtaken only by work that would have been done meanwhile anyway.
const AGEING: Tokens = 40;

#[derive(Debug, Clone)]
struct Entry<K> {
    key: K,
    work: Tokens,
    since: Millis,
}

/// See the module. `K` names a waiting turn.
#[derive(Debug, Clone)]
pub struct WaitQueue<K> {
    entries: Vec<Entry<K>>,
    capacity: usize,
    deadline: Millis,
}

impl<K: PartialEq + Clone> WaitQueue<K> {
    /// An empty queue for `capacity` turns that wait `deadline` ms at most.
    pub fn new(capacity: usize, deadline: Millis) -> Self {
        Self { entries: Vec::new(), capacity, deadline }
    }

    /// Turns waiting.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Enters a turn that waits since `since` (a turn that returns keeps its age). `false`: full.
    pub fn push(&mut self, key: K, work: Tokens, since: Millis) -> bool {
        if self.entries.len() >= self.capacity {
            return false;
        }
        self.entries.push(Entry { key, work, since });
        true
    }

    /// Takes a turn out, e.g. because its client left.
    pub fn remove(&mut self, key: &K) -> bool {
        let before = self.entries.len();
        self.entries.retain(|e| e.key != *key);
        self.entries.len() < before
    }

    /// Takes the turn to serve next among those `may` allows: least work left after ageing, then the oldest.
    pub fn pop(&mut self, now: Millis, may: impl Fn(&K) -> bool) -> Option<K> {
        let urgency = |e: &Entry<K>| {
            let aged = now.saturating_sub(e.since).saturating_mul(AGEING);
            (i128::from(e.work) - i128::from(aged), e.since)
        };
        let allowed = self.entries.iter().enumerate().filter(|(_, e)| may(&e.key));
        let (best, _) = allowed.min_by_key(|(i, e)| (urgency(e), *i))?;
        Some(self.entries.remove(best).key)
    }

    /// Takes out every turn whose deadline has passed.
    pub fn expired(&mut self, now: Millis) -> Vec<K> {
        let deadline = self.deadline;
        let (late, rest) = std::mem::take(&mut self.entries)
            .into_iter()
            .partition(|e| now.saturating_sub(e.since) >= deadline);
        self.entries = rest;
        late.into_iter().map(|e: Entry<K>| e.key).collect()
    }

    /// When the next deadline passes.
    pub fn next_deadline(&self) -> Option<Millis> {
        self.entries.iter().map(|e| e.since + self.deadline).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortest_first_until_age_wins() {
        let mut q = WaitQueue::new(8, 10_000);
        q.push("long", 100_000, 0);
        q.push("short", 1000, 0);
        assert_eq!(q.pop(0, |_| true), Some("short"));
        q.push("later", 1000, 2475);
        assert_eq!(q.pop(2475, |_| true), Some("long"));
        q.push("long", 100_000, 0);
        q.push("later", 1000, 2474);
        assert_eq!(q.clone().pop(2474, |_| true), Some("later"));
    }

    #[test]
    fn a_turn_that_was_just_tried_can_be_skipped() {
        let mut q = WaitQueue::new(8, 10_000);
        q.push("a", 1, 0);
        q.push("b", 2, 0);
        assert_eq!(q.pop(0, |k| *k != "a"), Some("b"));
        assert_eq!(q.pop(0, |k| *k != "a"), None);
    }

    #[test]
    fn bounded_and_every_wait_ends() {
        let mut q = WaitQueue::new(2, 10_000);
        assert!(q.push(1, 5, 0) && q.push(2, 5, 7) && !q.push(3, 5, 8));
        assert_eq!(q.next_deadline(), Some(10_000));
        assert_eq!(q.expired(9_999), Vec::<i32>::new());
        assert_eq!(q.expired(10_000), vec![1]);
        assert!(q.remove(&2) && !q.remove(&2) && q.is_empty());
    }
}
