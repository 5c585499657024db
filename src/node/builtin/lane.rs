//! The one prefill lane of a modelled machine: prompts are computed one after another (a P) or in chunks that
//! take turns (a D). First come, first served; a place given up costs nothing.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep_until};

/// See the module.
#[derive(Debug)]
pub struct Lane {
    turn: Semaphore,
    /// Until when modelled work goes on. Sleeping in the process is coarser than the model, so the next work
    /// starts from here and not from when the sleeper woke.
    busy_until: Mutex<Option<Instant>>,
}

/// A place at the front of the lane.
#[derive(Debug)]
pub struct Place<'a> {
    lane: &'a Lane,
    _permit: Option<SemaphorePermit<'a>>,
}

impl Default for Lane {
    fn default() -> Self {
        Self { turn: Semaphore::new(1), busy_until: Mutex::new(None) }
    }
}

impl Lane {
    /// Waits for the front.
    pub async fn enter(&self) -> Place<'_> {
        // The semaphore is never closed, so there is always a permit in the end.
        Place { lane: self, _permit: self.turn.acquire().await.ok() }
    }

    /// Whether something is being computed.
    pub fn busy(&self) -> bool {
        self.turn.available_permits() == 0
    }
}

impl Place<'_> {
    /// Lets modelled work of length `span` pass, for a turn that could start at `ready`; returns when it is
    /// done in modelled time.
    pub async fn work(&self, ready: Instant, span: Duration) -> Instant {
        let done = {
            let mut busy = self.lane.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
            let done = busy.map_or(ready, |until| until.max(ready)) + span;
            *busy = Some(done);
            done
        };
        pass(done).await;
        done
    }
}

/// Waits until `due`. The timer is too coarse for less than a millisecond: that only yields, and the next wait
/// makes up for it.
pub async fn pass(due: Instant) {
    if due > Instant::now() + Duration::from_millis(1) {
        sleep_until(due).await;
    } else {
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_is_serial_and_a_cancelled_wait_leaves_no_place() {
        let lane = Lane::default();
        let start = Instant::now();
        let span = Duration::from_millis(40);
        let one = async {
            let place = lane.enter().await;
            assert!(lane.busy());
            place.work(start, span).await
        };
        let two = async { lane.enter().await.work(start, span).await };
        let gone = async { tokio::time::timeout(Duration::from_millis(1), lane.enter()).await.is_err() };
        let (one, two, gone) = tokio::join!(one, two, gone);
        assert_eq!((one - start, two - start, gone), (span, 2 * span, true));
        assert!(!lane.busy());
    }
}
