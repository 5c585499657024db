//! The one gate in front of everything: how many turns may be placed or running at once. Its limit can change while
//! turns run.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Counts who is inside.
#[derive(Debug)]
pub struct Gate {
    limit: AtomicUsize,
    inside: AtomicUsize,
}

/// A place inside; leaves when dropped.
#[derive(Debug)]
pub struct Permit(Arc<Gate>);

impl Gate {
    /// A gate for `limit` at once.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit: AtomicUsize::new(limit), inside: AtomicUsize::new(0) })
    }

    /// A place, unless the gate is full. Nobody waits here.
    pub fn enter(self: &Arc<Self>) -> Option<Permit> {
        let limit = self.limit.load(Relaxed);
        let entered = self.inside.fetch_update(Relaxed, Relaxed, |n| (n < limit).then_some(n + 1));
        entered.is_ok().then(|| Permit(self.clone()))
    }

    /// Changes the limit. Whoever is inside stays.
    pub fn resize(&self, limit: usize) {
        self.limit.store(limit, Relaxed);
    }

    /// Places taken.
    pub fn inside(&self) -> usize {
        self.inside.load(Relaxed)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_also_after_it_shrank() {
        let gate = Gate::new(2);
        let (a, b) = (gate.enter().unwrap(), gate.enter().unwrap());
        assert!(gate.enter().is_none());
        gate.resize(1);
        drop(a);
        assert!(gate.enter().is_none(), "one is inside, and one may be");
        drop(b);
        assert!(gate.enter().is_some());
        gate.resize(3);
        let all: Vec<_> = (0..3).map(|_| gate.enter().unwrap()).collect();
        assert_eq!((gate.inside(), gate.enter().is_none()), (3, true));
        drop(all);
        assert_eq!(gate.inside(), 0);
    }
}
