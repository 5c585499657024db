//! β between turns: sessions whose D has dropped KV, and whether a backup within β is left of it. Each D's mirror tells
//! what was dropped; when pushes have had time to arrive, the P workers are asked what they hold of it. Turns that come
//! back say so too. It only measures: no decision looks here.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::backup::stale;
use super::gather::Fleet;
use super::reply::Reply;
use super::router::RouterMsg;
use super::shared::Shared;
use super::sync_meter::{OverBudget, SyncMeter};
use crate::core::sync::SyncRule;
use crate::core::types::{BlockHash, SessionId, Tokens};

/// Time a push has to arrive until it is missed.
const GRACE: Duration = Duration::from_secs(1);
/// Hashes of dropped blocks kept in all; the sessions that lost theirs first are no longer watched.
const MOST_BLOCKS: usize = 4 << 20;

/// KV that a D has dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Whose.
    pub session: SessionId,
    /// Its length before, in tokens.
    pub committed: Tokens,
    /// Blocks that stay.
    pub keep: u32,
    /// The blocks behind them.
    pub tail: Vec<BlockHash>,
}

#[derive(Debug)]
struct Watched {
    committed: Tokens,
    /// Place of the first block that is gone.
    from: u32,
    tail: Vec<BlockHash>,
    /// A look is due.
    due: bool,
    over: Option<OverBudget>,
    since: Instant,
}

#[derive(Debug, Default)]
struct Inner {
    sessions: HashMap<SessionId, Watched>,
    /// Oldest first; a session that is watched anew stands there twice.
    order: VecDeque<(Instant, SessionId)>,
    blocks: usize,
}

/// See the module.
#[derive(Debug)]
pub struct LostSessions {
    inner: Mutex<Inner>,
    /// Watched sessions: turns of all the others pass without the lock.
    watched: AtomicUsize,
    meter: Arc<SyncMeter>,
}

impl LostSessions {
    pub(super) fn new(meter: Arc<SyncMeter>) -> Self {
        Self { inner: Mutex::default(), watched: AtomicUsize::new(0), meter }
    }

    fn change<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner: MutexGuard<'_, Inner> = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut inner);
        self.watched.store(inner.sessions.len(), Relaxed);
        result
    }

    /// A D has dropped KV. Returns whether somebody has to look in a moment.
    fn dropped(&self, dropped: Dropped) -> bool {
        let now = Instant::now();
        self.change(|inner| {
            let before = inner.take(&dropped.session);
            let (mut committed, mut tail, mut due, mut over) = (dropped.committed, dropped.tail, false, None);
            if let Some(before) = before {
                // Bit by bit from its end: what went before went from behind this.
                if before.from == dropped.keep + tail.len() as u32 {
                    committed = committed.max(before.committed);
                    tail.extend(before.tail);
                }
                (due, over) = (before.due, before.over);
            }
            let watched = Watched { committed, from: dropped.keep, tail, due: true, over, since: now };
            inner.put(dropped.session, watched);
            !due
        })
    }

    /// The dropped blocks of a session, to ask about.
    fn tail(&self, session: &SessionId) -> Option<Arc<[BlockHash]>> {
        self.change(|inner| {
            let watched = inner.sessions.get_mut(session)?;
            watched.due = false;
            Some(watched.tail.as_slice().into())
        })
    }

    /// What the fleet holds of a session's dropped blocks.
    fn judge(&self, session: &SessionId, fleet: &Fleet, rule: &SyncRule, block: Tokens) {
        self.change(|inner| {
            let Some(watched) = inner.sessions.get_mut(session) else { return };
            // It may be served elsewhere by now, and this was its old place.
            if fleet.decode.iter().any(|d| d.resident >= watched.committed) {
                inner.take(session);
                return;
            }
            let lost = watched.committed.saturating_sub(Tokens::from(watched.from) * block);
            let best = stale(&fleet.holdings, 0, lost, block).map(|(_, tokens)| tokens).min().unwrap_or(lost);
            if rule.within(best) {
                watched.over = None;
            } else if watched.over.is_none() {
                watched.over = Some(self.meter.over_budget());
            }
        });
    }

    /// A turn of the session has looked for its backups itself.
    pub(super) fn found(&self, session: &SessionId, over: bool) {
        if !over {
            return self.returned(session);
        }
        self.change(|inner| {
            let before = inner.take(session).and_then(|watched| watched.over);
            let over = Some(before.unwrap_or_else(|| self.meter.over_budget()));
            let since = Instant::now();
            let watched = Watched { committed: 0, from: 0, tail: Vec::new(), due: false, over, since };
            inner.put(session.clone(), watched);
        });
    }

    /// The session is resident again.
    pub(super) fn returned(&self, session: &SessionId) {
        if self.watched.load(Relaxed) > 0 {
            self.change(|inner| drop(inner.take(session)));
        }
    }

    /// Forgets what was dropped before `horizon`.
    pub(super) fn sweep(&self, horizon: Instant) {
        self.change(|inner| inner.forget(|since, _| since < horizon));
    }
}

impl Inner {
    fn put(&mut self, session: SessionId, watched: Watched) {
        self.blocks += watched.tail.len();
        self.order.push_back((watched.since, session.clone()));
        self.sessions.insert(session, watched);
        self.forget(|_, blocks| blocks > MOST_BLOCKS);
    }

    fn take(&mut self, session: &SessionId) -> Option<Watched> {
        let watched = self.sessions.remove(session)?;
        self.blocks -= watched.tail.len();
        Some(watched)
    }

    /// Drops the oldest while `too` old, or too many blocks are kept.
    fn forget(&mut self, too: impl Fn(Instant, usize) -> bool) {
        while let Some((since, session)) = self.order.front().cloned() {
            let known = self.sessions.get(&session).is_some_and(|watched| watched.since == since);
            if known && !too(since, self.blocks) {
                return;
            }
            self.order.pop_front();
            if known {
                self.take(&session);
            }
        }
    }
}

/// What a D's mirror has seen of a session.
#[derive(Debug)]
pub enum Moved<'a> {
    /// KV that went.
    Dropped(Dropped),
    /// A turn left KV there.
    Held(&'a SessionId),
}

impl Shared {
    /// A D holds what a turn left. Under `commit` that has to travel first: the session's next turn says.
    pub(super) fn held(&self, session: &SessionId) {
        if SyncRule::of(&self.config.options).is_some_and(|rule| !rule.on_commit) {
            self.lost.returned(session);
        }
    }

    /// A D's mirror has seen KV go. Without sync nobody promises anything about it.
    pub(super) fn lost(self: &Arc<Self>, dropped: Dropped) {
        let Some(rule) = SyncRule::of(&self.config.options) else { return };
        let session = dropped.session.clone();
        if !self.lost.dropped(dropped) {
            return;
        }
        let shared = self.clone();
        tokio::spawn(async move {
            sleep(GRACE).await;
            let Some(chain) = shared.lost.tail(&session) else { return };
            let (reply, fleet) = Reply::channel();
            shared.router(RouterMsg::Gather { session: session.clone(), chain, reply });
            if let Some(fleet) = fleet.await {
                let block = shared.config.options.block_tokens.into();
                shared.lost.judge(&session, &fleet, &rule, block);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::backup::Holding;
    use crate::core::options::Options;
    use crate::core::types::WorkerId;

    const BLOCK: Tokens = 24;

    fn dropped(session: &str, committed: Tokens, blocks: std::ops::Range<u64>) -> Dropped {
        let keep = blocks.start as u32;
        Dropped { session: SessionId::new(session), committed, keep, tail: blocks.map(BlockHash).collect() }
    }

    fn fleet(held: u32) -> Fleet {
        // One run is a list of one run.
        #[allow(clippy::single_range_in_vec_init)]
        let runs = if held > 0 { vec![0..held] } else { Vec::new() };
        Fleet { holdings: vec![Holding { p: WorkerId(9), runs }], ..Fleet::default() }
    }

    fn book(beta: Tokens) -> (LostSessions, SyncRule, Arc<SyncMeter>) {
        let options =
            Options { d2p_staleness_budget_tokens: Some(beta), block_tokens: 24, ..Options::production() };
        let meter = Arc::new(SyncMeter::default());
        (LostSessions::new(meter.clone()), SyncRule::of(&options).unwrap(), meter)
    }

    #[tokio::test(start_paused = true)]
    async fn what_p_lacks_of_the_dropped_counts() {
        let (lost, rule, meter) = book(48);
        let me = SessionId::new("me");
        assert!(lost.dropped(dropped("me", 245, 6..10)));
        // 101 tokens are gone; P has 72 of them, then 48.
        for (held, over) in [(3, 0), (2, 1), (4, 0), (0, 1)] {
            lost.judge(&me, &fleet(held), &rule, BLOCK);
            assert_eq!(meter.figures().over_budget, over, "{held} blocks at P");
        }
        lost.returned(&me);
        assert_eq!(meter.figures().over_budget, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_tail_that_goes_bit_by_bit_is_one_loss() {
        let (lost, rule, meter) = book(0);
        let me = SessionId::new("me");
        assert!(lost.dropped(dropped("me", 240, 8..10)));
        assert!(!lost.dropped(dropped("me", 192, 5..8)), "somebody is about to look");
        assert_eq!(lost.tail(&me).unwrap().to_vec(), (5..10).map(BlockHash).collect::<Vec<_>>());
        lost.judge(&me, &fleet(3), &rule, BLOCK);
        assert_eq!(meter.figures().over_budget, 1, "two of five blocks have no backup");
        lost.judge(&me, &fleet(5), &rule, BLOCK);
        assert_eq!(meter.figures().over_budget, 0);
        // Another chain: what was dropped before is of no use any more.
        assert!(lost.dropped(dropped("me", 240, 2..3)));
        assert_eq!(lost.tail(&me).unwrap().to_vec(), [BlockHash(2)]);
    }

    #[tokio::test(start_paused = true)]
    async fn watched_sessions_are_bounded_by_age_and_by_blocks() {
        let (lost, rule, meter) = book(0);
        lost.dropped(dropped("old", 240, 0..10));
        lost.judge(&SessionId::new("old"), &fleet(0), &rule, BLOCK);
        tokio::time::advance(Duration::from_secs(10)).await;
        let horizon = Instant::now();
        lost.found(&SessionId::new("new"), true);
        assert_eq!(meter.figures().over_budget, 2);
        lost.sweep(horizon);
        assert_eq!((meter.figures().over_budget, lost.watched.load(Relaxed)), (1, 1));
        lost.found(&SessionId::new("new"), false);
        let half = MOST_BLOCKS as u64 / 2;
        for session in ["a", "b", "c"] {
            lost.dropped(dropped(session, half * BLOCK, 0..half));
        }
        assert_eq!(lost.change(|inner| (inner.sessions.len(), inner.blocks)), (2, MOST_BLOCKS));
        assert_eq!(lost.tail(&SessionId::new("a")), None);
    }
}
