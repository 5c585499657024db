//! The wait queue of turns no D admitted (D5): global, bounded, shortest work first with ageing, a deadline each, and fair
//! between sessions: of those that wait, the one that got least is served next.

use std::collections::HashMap;

use super::types::{Millis, SessionId, Tokens};

/// Tokens of priority a turn gains per ms of waiting: about what a P computes in that time, so a long turn is
/// overtaken only by work that would have been done meanwhile anyway.
const AGEING: Tokens = 40;

#[derive(Debug, Clone)]
struct Entry<K> {
    key: K,
    session: SessionId,
    work: Tokens,
    since: Millis,
}

/// See the module. `K` names a waiting turn.
#[derive(Debug, Clone)]
pub struct WaitQueue<K> {
    entries: Vec<Entry<K>>,
    /// Turns taken out to be served, of sessions that have more waiting.
    taken: HashMap<SessionId, u32>,
    capacity: usize,
    deadline: Millis,
}

/// What became of a turn that wants to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed<K> {
    /// It waits.
    Waits,
    /// It waits, in the place of another session's turn: that session has far more waiting.
    InPlaceOf(K),
    /// The queue is full.
    Full,
}

impl<K: PartialEq + Clone> WaitQueue<K> {
    /// An empty queue for `capacity` turns that wait `deadline` ms at most.
    pub fn new(capacity: usize, deadline: Millis) -> Self {
        Self { entries: Vec::new(), taken: HashMap::new(), capacity, deadline }
    }

    /// Turns waiting.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Enters a turn that waits since `since`. A full queue makes room when one session has at least two turns more in
    /// it than this one would: its youngest goes.
    pub fn push(&mut self, key: K, session: &SessionId, work: Tokens, since: Millis) -> Pushed<K> {
        let entry = Entry { key, session: session.clone(), work, since };
        if self.entries.len() < self.capacity {
            self.entries.push(entry);
            return Pushed::Waits;
        }
        let mut counts: HashMap<&SessionId, usize> = HashMap::new();
        self.entries.iter().for_each(|e| *counts.entry(&e.session).or_default() += 1);
        let own = counts.get(session).copied().unwrap_or(0);
        let greedy = counts.into_iter().max_by(|a, b| (a.1, a.0).cmp(&(b.1, b.0)));
        let Some(greedy) = greedy.filter(|(_, n)| *n > own + 1).map(|(session, _)| session.clone()) else {
            return Pushed::Full;
        };
        let theirs = self.entries.iter().enumerate().filter(|(_, e)| e.session == greedy);
        let Some((youngest, _)) = theirs.max_by_key(|(i, e)| (e.since, *i)) else { return Pushed::Full };
        let gone = std::mem::replace(&mut self.entries[youngest], entry);
        Pushed::InPlaceOf(gone.key)
    }

    /// Enters a turn again that was taken out in vain: it keeps its age, and its session got nothing.
    pub fn back(&mut self, key: K, session: &SessionId, work: Tokens, since: Millis) -> Pushed<K> {
        if let Some(taken) = self.taken.get_mut(session) {
            *taken = taken.saturating_sub(1);
        }
        self.push(key, session, work, since)
    }

    /// Takes a turn out, e.g. because its client left.
    pub fn remove(&mut self, key: &K) -> bool {
        let before = self.entries.len();
        self.entries.retain(|e| e.key != *key);
        self.forget();
        self.entries.len() < before
    }

    /// Takes the turn to serve next among those `may` allows: of the session that got least; of its turns and of equal
    /// sessions the one with least work left after ageing, then the oldest.
    pub fn pop(&mut self, now: Millis, may: impl Fn(&K) -> bool) -> Option<K> {
        let urgency = |e: &Entry<K>| {
            let aged = now.saturating_sub(e.since).saturating_mul(AGEING);
            let got = self.taken.get(&e.session).copied().unwrap_or(0);
            (got, i128::from(e.work) - i128::from(aged), e.since)
        };
        let allowed = self.entries.iter().enumerate().filter(|(_, e)| may(&e.key));
        let (best, _) = allowed.min_by_key(|(i, e)| (urgency(e), *i))?;
        let Entry { key, session, .. } = self.entries.remove(best);
        *self.taken.entry(session).or_default() += 1;
        self.forget();
        Some(key)
    }

    /// Takes out every turn whose deadline has passed.
    pub fn expired(&mut self, now: Millis) -> Vec<K> {
        let deadline = self.deadline;
        let (late, rest) = std::mem::take(&mut self.entries)
            .into_iter()
            .partition(|e| now.saturating_sub(e.since) >= deadline);
        self.entries = rest;
        self.forget();
        late.into_iter().map(|e: Entry<K>| e.key).collect()
    }

    /// When the next deadline passes.
    pub fn next_deadline(&self) -> Option<Millis> {
        self.entries.iter().map(|e| e.since + self.deadline).min()
    }

    /// Only sessions that wait are compared.
    fn forget(&mut self) {
        if !self.taken.is_empty() {
            let entries = &self.entries;
            self.taken.retain(|session, _| entries.iter().any(|e| e.session == *session));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(session: &str) -> SessionId {
        SessionId::new(session)
    }

    /// Each turn its own session.
    fn push(q: &mut WaitQueue<&'static str>, key: &'static str, work: Tokens, since: Millis) {
        assert_eq!(q.push(key, &of(key), work, since), Pushed::Waits);
    }

    #[test]
    fn shortest_first_until_age_wins() {
        let mut q = WaitQueue::new(8, 10_000);
        push(&mut q, "long", 100_000, 0);
        push(&mut q, "short", 1000, 0);
        assert_eq!(q.pop(0, |_| true), Some("short"));
        push(&mut q, "later", 1000, 2475);
        assert_eq!(q.pop(2475, |_| true), Some("long"));
        push(&mut q, "long", 100_000, 0);
        push(&mut q, "later2", 1000, 2474);
        assert_eq!(q.clone().pop(2474, |k| *k != "later"), Some("later2"));
    }

    #[test]
    fn a_turn_that_was_just_tried_can_be_skipped() {
        let mut q = WaitQueue::new(8, 10_000);
        push(&mut q, "a", 1, 0);
        push(&mut q, "b", 2, 0);
        assert_eq!(q.pop(0, |k| *k != "a"), Some("b"));
        assert_eq!(q.pop(0, |k| *k != "a"), None);
    }

    #[test]
    fn bounded_and_every_wait_ends() {
        let mut q = WaitQueue::new(2, 10_000);
        let waits = |p| p == Pushed::Waits;
        assert!(waits(q.push(1, &of("a"), 5, 0)) && waits(q.push(2, &of("b"), 5, 7)));
        assert_eq!(q.push(3, &of("c"), 5, 8), Pushed::Full);
        assert_eq!(q.next_deadline(), Some(10_000));
        assert_eq!(q.expired(9_999), Vec::<i32>::new());
        assert_eq!(q.expired(10_000), vec![1]);
        assert!(q.remove(&2) && !q.remove(&2) && q.is_empty());
    }

    /// A session with a hundred short turns does not keep another one with a single long turn waiting.
    #[test]
    fn sessions_take_turns() {
        let mut q = WaitQueue::new(256, 10_000);
        for i in 0..100 {
            q.push(i, &of("greedy"), 100, 0);
        }
        q.push(1000, &of("modest"), 90_000, 0);
        q.push(1001, &of("other"), 80_000, 0);
        let order: Vec<i32> = (0..5).filter_map(|_| q.pop(0, |_| true)).collect();
        assert_eq!(order, [0, 1001, 1000, 1, 2]);
        // A turn taken in vain does not count as served.
        q.push(1002, &of("modest"), 90_000, 0);
        let mut q2 = q.clone();
        assert_eq!(q2.pop(0, |_| true), Some(1002));
        q2.back(1002, &of("modest"), 90_000, 0);
        assert_eq!(q2.pop(0, |_| true), Some(1002));
    }

    #[test]
    fn a_full_queue_makes_room_for_who_has_little_in_it() {
        let mut q = WaitQueue::new(4, 10_000);
        for i in 0..4 {
            q.push(i, &of("greedy"), 1, i as Millis);
        }
        assert_eq!(q.push(10, &of("a"), 1, 9), Pushed::InPlaceOf(3));
        assert_eq!(q.push(11, &of("greedy"), 1, 9), Pushed::Full);
        assert_eq!(q.push(12, &of("a"), 1, 9), Pushed::InPlaceOf(2));
        assert_eq!(q.push(13, &of("a"), 1, 9), Pushed::Full, "two each");
        assert_eq!(q.len(), 4);
    }
}
