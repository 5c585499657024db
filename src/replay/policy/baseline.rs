//! The frame of the policies that only choose workers: no admission, the engine queues what it has no room for.

use std::collections::HashMap;

use super::Router;
use crate::core::turn::Refused;
use crate::core::types::{Mode, Rung, SessionId, Tokens};
use crate::replay::sim::fleet::Fleet;
use crate::replay::sim::job::{JobId, Plan};

/// What such a policy sees of a D or fused worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkerView {
    /// Turns dispatched to it and not complete.
    pub requests: u32,
    /// Tokens of this prompt it holds.
    pub hit: Tokens,
    /// Prompt tokens dispatched to it and not computed.
    pub pending: Tokens,
    /// Context tokens of the turns on it.
    pub active: Tokens,
    /// Tokens its pool holds.
    pub cached: Tokens,
}

/// What it sees of the fleet and the turn.
#[derive(Debug)]
pub struct View<'a> {
    /// The session.
    pub session: &'a SessionId,
    /// Prompt tokens.
    pub input: Tokens,
    /// D or fused workers.
    pub workers: &'a [WorkerView],
    /// Prompt tokens pending at each P.
    pub prefills: &'a [Tokens],
}

impl View<'_> {
    /// Tokens a worker would have to compute.
    pub fn uncached(&self, worker: usize) -> Tokens {
        self.input.saturating_sub(self.workers[worker].hit)
    }

    /// The P with least pending.
    pub fn idlest_prefill(&self) -> Option<usize> {
        (0..self.prefills.len()).min_by_key(|p| (self.prefills[*p], *p))
    }
}

/// Sessions bound to the worker of their first turn: the one with fewest requests, then fewest sessions.
#[derive(Debug, Default)]
pub struct Pins {
    of: HashMap<SessionId, usize>,
    sessions: Vec<u32>,
}

impl Pins {
    /// A session's worker, and whether it was bound just now.
    pub fn of(&mut self, view: &View<'_>) -> (usize, bool) {
        if let Some(worker) = self.of.get(view.session) {
            return (*worker, false);
        }
        self.sessions.resize(view.workers.len(), 0);
        let load = |w: &usize| (view.workers[*w].requests, self.sessions[*w], *w);
        let worker = (0..view.workers.len()).min_by_key(load).unwrap_or(0);
        self.sessions[worker] += 1;
        self.of.insert(view.session.clone(), worker);
        (worker, true)
    }
}

/// Where a turn goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Worker computes everything it lacks.
    Local(usize),
    /// P computes, D decodes.
    Through(usize, usize),
}

/// A policy that only chooses workers.
pub trait Choose: std::fmt::Debug {
    /// Chooses for one turn.
    fn choose(&mut self, view: &View<'_>) -> Route;
}

/// See the module.
#[derive(Debug)]
pub struct Baseline<C> {
    chooser: C,
    requests: Vec<u32>,
}

impl<C: Choose> Baseline<C> {
    /// A router around a chooser.
    pub fn new(chooser: C) -> Self {
        Self { chooser, requests: Vec::new() }
    }

    fn view(&self, fleet: &Fleet, job: JobId) -> Vec<WorkerView> {
        let j = &fleet.jobs[job];
        let block = fleet.block();
        let each = fleet.ds.iter().enumerate().map(|(i, d)| {
            let pool = d.ledger.residency().prefix(&j.chain);
            let hosted = d.host.run(&j.chain[pool..]);
            WorkerView {
                requests: self.requests[i],
                hit: (pool + hosted) as Tokens * block,
                pending: d.queued() + d.waiting.iter().map(|w| fleet.jobs[*w].input).sum::<Tokens>(),
                active: d.active(),
                cached: d.ledger.residency().blocks() as Tokens * block,
            }
        });
        each.collect()
    }
}

impl<C: Choose> Router for Baseline<C> {
    fn arrive(&mut self, fleet: &mut Fleet, job: JobId) {
        self.requests.resize(fleet.ds.len(), 0);
        let workers = self.view(fleet, job);
        let prefills: Vec<Tokens> = fleet.ps.iter().map(|p| p.backlog).collect();
        let j = &fleet.jobs[job];
        let view = View { session: &j.session, input: j.input, workers: &workers, prefills: &prefills };
        let (prefill, decode) = match self.chooser.choose(&view) {
            Route::Local(d) => (None, d),
            Route::Through(p, d) => (Some(p), d),
        };
        self.requests[decode] += 1;
        let resident = fleet.ds[decode].ledger.residency().get(&j.session).is_some();
        let missing = j.input - workers[decode].hit.min(j.input);
        let direct = prefill.is_none() && resident && missing <= fleet.options.tau_append;
        let (mode, rung) = match (direct, prefill.is_some(), j.turn) {
            (true, ..) => (Mode::Direct, Rung::Append),
            (_, through, turn) => (
                if turn == 0 { Mode::Seed } else { Mode::Reseed },
                if through { Rung::Full } else { Rung::Local },
            ),
        };
        fleet.dispatch(job, Plan { mode, rung, prefill, decode, admitted: false });
    }

    fn done(&mut self, fleet: &mut Fleet, job: JobId) {
        if let Some(plan) = fleet.jobs[job].plan {
            self.requests[plan.decode] -= 1;
        }
    }

    fn freed(&mut self, _: &mut Fleet, _: usize) {}

    fn deadline(&mut self, _: &mut Fleet, _: JobId) {}

    fn take_refused(&mut self) -> Vec<(JobId, Refused)> {
        Vec::new()
    }
}

#[cfg(test)]
pub mod testing {
    //! Views for the tests of choosers.

    use super::*;

    /// A worker with `requests`, of which this prompt's `hit` tokens are cached and `pending` are queued.
    pub fn worker(requests: u32, hit: Tokens, pending: Tokens) -> WorkerView {
        WorkerView { requests, hit, pending, ..WorkerView::default() }
    }

    /// Owns what a view borrows.
    pub struct Case {
        session: SessionId,
        input: Tokens,
        workers: Vec<WorkerView>,
        prefills: Vec<Tokens>,
    }

    impl Case {
        /// A turn of `session`.
        pub fn new(session: &str, input: Tokens, workers: &[WorkerView], prefills: &[Tokens]) -> Self {
            Self {
                session: SessionId::new(session),
                input,
                workers: workers.to_vec(),
                prefills: prefills.to_vec(),
            }
        }

        /// The view of it.
        pub fn view(&self) -> View<'_> {
            View {
                session: &self.session,
                input: self.input,
                workers: &self.workers,
                prefills: &self.prefills,
            }
        }
    }
}
