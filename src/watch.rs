//! A value whose changes others wait for. As tokio's watch channel, but whoever waits is woken in the order it came:
//! tokio's picks a waiter's place at random, and then no schedule of the fault lab would replay.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// See the module.
#[derive(Debug, Default)]
pub struct Watch<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T: Clone + PartialEq> Watch<T> {
    /// A value nobody waits for yet.
    pub fn new(value: T) -> Arc<Self> {
        Arc::new(Self { value: Mutex::new(value), changed: Notify::new() })
    }

    /// The value now.
    pub fn get(&self) -> T {
        self.lock().clone()
    }

    /// Changes the value; when it is another one then, everyone who waits looks at it.
    pub fn modify(&self, change: impl FnOnce(&mut T)) {
        let mut value = self.lock();
        let before = value.clone();
        change(&mut value);
        let changed = *value != before;
        drop(value);
        if changed {
            self.changed.notify_waiters();
        }
    }

    /// Waits until the value is one that `holds`; returns it.
    pub async fn until(&self, mut holds: impl FnMut(&T) -> bool) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            let value = self.get();
            if holds(&value) {
                return value;
            }
            changed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One who follows the changes of a value.
#[derive(Debug)]
pub struct Follower<T> {
    watch: Arc<Watch<T>>,
    seen: T,
}

impl<T: Clone + PartialEq> Follower<T> {
    /// Follows from now on.
    pub fn new(watch: &Arc<Watch<T>>) -> Self {
        Self { watch: watch.clone(), seen: watch.get() }
    }

    /// What there is now counts as seen.
    pub fn catch_up(&mut self) {
        self.seen = self.watch.get();
    }

    /// Waits until the value is not the one seen last.
    pub async fn changed(&mut self) {
        let seen = &self.seen;
        self.seen = self.watch.until(|value| value != seen).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waiters_are_woken_in_order_and_miss_nothing() {
        let watch = Watch::new(0);
        let order = Arc::new(Mutex::new(Vec::new()));
        for n in 0..20 {
            let (mut follower, order) = (Follower::new(&watch), order.clone());
            tokio::spawn(async move {
                follower.changed().await;
                order.lock().unwrap().push(n);
            });
        }
        tokio::task::yield_now().await;
        let mut late = Follower::new(&watch);
        watch.modify(|value| *value += 1);
        late.changed().await; // a change before the wait counts
        late.catch_up();
        assert_eq!(watch.until(|value| *value > 0).await, 1);
        tokio::task::yield_now().await;
        assert_eq!(*order.lock().unwrap(), (0..20).collect::<Vec<_>>());
        let waits = tokio::time::timeout(std::time::Duration::from_secs(1), late.changed());
        watch.modify(|_| {});
        assert!(waits.await.is_err());
    }
}
