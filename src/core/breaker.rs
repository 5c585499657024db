//! A breaker per worker: it opens on real failures only, lets one turn through when it has been open for a while, and closes
//! when that one is served. Pure: time is told.
//!
//! ```text
//! closed ── `failures` in a row ──▶ open ── after `open_ms`, doubled each time ──▶ half open ── served ──▶ closed
//!    ▲                               ▲                                                 │
//!    └── served: the row begins anew └──────────────── failed ─────────────────────────┘
//! ```

use smallvec::SmallVec;

use super::types::Millis;

/// When it opens, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Failures in a row that open it; 0 = never.
    pub failures: u32,
    /// How long it stays open the first time, in ms.
    pub open_ms: Millis,
}

/// Longest time it stays open, as a multiple of `open_ms`.
const LONGEST: Millis = 12;
/// A turn let through on trial that has not ended after so many ms is forgotten: another one is tried.
const TRIAL: Millis = 30_000;

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No connection, or one that broke: the worker's own fault.
    Broken,
    /// It answered 5xx. May be this request's fault, so each session (by its digest) counts once in a row.
    Error(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed,
    Open { until: Millis },
    Trial { since: Millis },
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Breaker {
    limits: Limits,
    state: State,
    row: u32,
    sessions: SmallVec<[u64; 8]>,
    open_for: Millis,
}

impl Breaker {
    /// A closed one.
    pub fn new(limits: Limits) -> Self {
        Self { limits, state: State::Closed, row: 0, sessions: SmallVec::new(), open_for: limits.open_ms }
    }

    /// Whether a turn may be sent.
    pub fn allows(&self, now: Millis) -> bool {
        match self.state {
            State::Closed => true,
            State::Open { until } => now >= until,
            State::Trial { since } => now.saturating_sub(since) >= TRIAL,
        }
    }

    /// A turn is sent, if it may be. After a time of being open it is the one on trial.
    pub fn send(&mut self, now: Millis) -> bool {
        let allowed = self.allows(now);
        if allowed && self.state != State::Closed {
            self.state = State::Trial { since: now };
        }
        allowed
    }

    /// A turn was served. One sent before it opened says nothing about now.
    pub fn served(&mut self, now: Millis) {
        if !self.is_open(now) {
            *self = Self::new(self.limits);
        }
    }

    /// A turn failed.
    pub fn failed(&mut self, fault: Fault, now: Millis) {
        match self.state {
            State::Closed => {
                if let Fault::Error(session) = fault {
                    if self.sessions.contains(&session) {
                        return;
                    }
                    self.sessions.push(session);
                }
                self.row += 1;
                if self.limits.failures > 0 && self.row >= self.limits.failures {
                    self.open(now);
                }
            }
            // Not everybody asks before: whatever is sent when it may be is on trial.
            State::Open { until } if now < until => {}
            State::Open { .. } | State::Trial { .. } => {
                self.open_for = (2 * self.open_for).min(LONGEST * self.limits.open_ms);
                self.open(now);
            }
        }
    }

    /// A turn ended and says nothing about the worker: its client left, it was refused, it was placed elsewhere.
    pub fn ended(&mut self, now: Millis) {
        if let State::Trial { .. } = self.state {
            self.state = State::Open { until: now };
        }
    }

    /// Until when nothing is sent, while it is open.
    pub fn opens_at(&self) -> Option<Millis> {
        match self.state {
            State::Closed => None,
            State::Open { until } => Some(until),
            State::Trial { since } => Some(since + TRIAL),
        }
    }

    /// Whether it keeps turns away.
    pub fn is_open(&self, now: Millis) -> bool {
        matches!(self.state, State::Open { until } if now < until)
    }

    fn open(&mut self, now: Millis) {
        self.state = State::Open { until: now + self.open_for };
        self.row = 0;
        self.sessions.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { failures: 3, open_ms: 1000 };

    fn broken(breaker: &mut Breaker, times: u32, now: Millis) {
        (0..times).for_each(|_| breaker.failed(Fault::Broken, now));
    }

    #[test]
    fn opens_tries_one_and_closes() {
        let mut b = Breaker::new(LIMITS);
        broken(&mut b, 2, 0);
        b.served(1);
        broken(&mut b, 2, 2);
        assert!(b.allows(3), "a turn served between them ends the row");
        broken(&mut b, 1, 10);
        assert!(!b.allows(1009) && b.is_open(1009));
        assert!(b.send(1010) && !b.send(1011), "one on trial");
        b.failed(Fault::Broken, 1020);
        assert!(!b.allows(3019) && b.allows(3020), "twice as long");
        assert!(b.send(3020));
        b.served(3100);
        assert!(b.send(3101) && b.send(3102));
        broken(&mut b, 3, 4000);
        assert!(b.allows(5000), "as long as at first");
    }

    #[test]
    fn one_sessions_poison_does_not_open_it() {
        let mut b = Breaker::new(LIMITS);
        (0..100).for_each(|i| b.failed(Fault::Error(7), i));
        assert!(b.allows(100));
        b.failed(Fault::Error(8), 100);
        b.failed(Fault::Error(9), 100);
        assert!(!b.allows(101));
    }

    #[test]
    fn a_trial_without_a_verdict_makes_room_for_another() {
        let mut b = Breaker::new(LIMITS);
        broken(&mut b, 3, 0);
        assert!(b.send(1000));
        b.ended(1500);
        assert!(b.send(1500) && !b.send(1500 + TRIAL - 1) && b.send(1500 + TRIAL));
        let mut never = Breaker::new(Limits { failures: 0, ..LIMITS });
        broken(&mut never, 1000, 0);
        assert!(never.allows(0));
    }

    proptest! {
        /// Whatever happens: it opens only after enough failures in a row, sends nothing while it is open and one turn at a
        /// time on trial, is never open for longer than its limit, and a turn served on trial closes it.
        #[test]
        fn keeps_its_promises(events in prop::collection::vec((0u8..4, 0u64..4000), 1..200)) {
            let mut b = Breaker::new(LIMITS);
            let (mut now, mut row, mut trial): (Millis, u32, Option<Millis>) = (0, 0, None);
            for (event, later) in events {
                now += later;
                let open = b.is_open(now);
                let closed = b.opens_at().is_none();
                match event {
                    0 => {
                        let sent = b.send(now);
                        prop_assert!(!(sent && open));
                        prop_assert!(sent || !closed);
                        if sent && !closed {
                            prop_assert!(trial.is_none_or(|since| now - since >= TRIAL));
                            trial = Some(now);
                        }
                    }
                    1 => {
                        b.served(now);
                        prop_assert!(open || b.opens_at().is_none());
                        if !open {
                            (row, trial) = (0, None);
                        }
                    }
                    2 => {
                        b.failed(Fault::Broken, now);
                        row += 1;
                        if b.is_open(now) && closed {
                            prop_assert!(row >= LIMITS.failures);
                        }
                        if b.is_open(now) {
                            (row, trial) = (0, None);
                        }
                    }
                    _ => {
                        b.ended(now);
                        trial = None;
                    }
                }
                prop_assert!(b.opens_at().is_none_or(|at| at <= now + (LONGEST * LIMITS.open_ms).max(TRIAL)));
            }
            prop_assert!(b.allows(now + (LONGEST * LIMITS.open_ms).max(TRIAL)));
        }
    }
}
