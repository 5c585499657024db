//! The discrete-event simulation: one policy, one seed, one setting → every turn's record. Time is integer µs and
//! events are ordered by (time, order of scheduling), so the same seed gives the same run.

mod batch;
pub mod decode;
pub mod fleet;
pub mod job;
pub mod prefill;
pub mod sync;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::bounds::Access;
use super::hist::Hist;
use super::policy::{Policy, Router};
use super::settings::Setting;
use super::trace::Trace;
use super::workload::Workload;
use crate::core::ledger::Evicted;
use crate::core::residency::common_prefix;
use crate::core::turn::Refused;
use crate::core::types::{BlockHash, BlockHashing, Mode, Rung, Tokens};
use decode::MODES;
use fleet::{Fleet, Notice, Tick};
use job::{Job, JobId};
use sync::SyncFigures;

/// What became of one turn.
#[derive(Debug, Clone)]
pub struct TurnRecord {
    /// Session and turn in the trace: the same for every policy.
    pub key: (usize, usize),
    /// How it was served, or why it was not.
    pub served: Result<(Mode, Rung), Refused>,
    /// Prompt tokens.
    pub input: Tokens,
    /// Answer tokens.
    pub output: Tokens,
    /// Tokens some worker had to compute.
    pub computed_p: Tokens,
    /// Tokens D computed.
    pub computed_d: Tokens,
    /// Tokens an infinite cache would have had.
    pub ideal: Tokens,
    /// A later turn with an append within `τ_append`.
    pub eligible: bool,
    /// Left a worker that held it.
    pub abandoned: bool,
    /// KV tokens that travelled to D.
    pub moved: Tokens,
    /// First byte after the first attempt, µs.
    pub ttft: u64,
    /// Last byte after the first attempt, µs.
    pub e2e: u64,
    /// 429 answers the client saw for it.
    pub refusals: u32,
}

/// Load of the workers in one window.
#[derive(Debug, Clone)]
pub struct Window {
    /// Its end in µs.
    pub at: u64,
    /// Whether every lane was live.
    pub full: bool,
    /// Tokens each D served in it.
    pub served: Vec<Tokens>,
    /// Turns on each D at its end.
    pub running: Vec<u32>,
}

/// One run.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// Measured turns, in order of completion.
    pub records: Vec<TurnRecord>,
    /// All turns simulated, warm-up included.
    pub turns: usize,
    /// ITL by mode.
    pub itl: [Hist; MODES],
    /// Load over time.
    pub windows: Vec<Window>,
    /// Served turns in order of arrival, for the residency bounds.
    pub accesses: Vec<Access>,
    /// Evictions at D.
    pub evicted: Evicted,
    /// D→P sync.
    pub sync: SyncFigures,
    /// Restores within β, and those that cost more than Theorem 4 allows.
    pub theorem_4: (u64, u64),
    /// Share of the time each P computed.
    pub prefill_busy: Vec<f64>,
    /// 429 and 413 answers by reason.
    pub rejects: [u64; 4],
    /// Turns that never ended: always 0 unless the fleet is wedged.
    pub stuck: u64,
}

/// Length of a load window.
const WINDOW_US: u64 = 60_000_000;

/// Told about progress; may stop the run.
#[derive(Debug, Default)]
pub struct Control {
    /// Turns simulated so far, by all runs.
    pub turns: AtomicU64,
    /// Set by Ctrl-C.
    pub stop: AtomicBool,
}

struct World<'a> {
    setting: &'a Setting,
    trace: &'a Trace,
    work: Workload<'a>,
    fleet: Fleet,
    router: Box<dyn Router>,
    heap: BinaryHeap<Reverse<(u64, u64, Tick)>>,
    /// Arrivals in a clock that stands still while idle time is skipped: `time + shift`.
    arrivals: BinaryHeap<Reverse<(u64, u64, Tick)>>,
    shift: u64,
    order: u64,
    seen: HashSet<BlockHash, BlockHashing>,
    open: usize,
    next_window: u64,
    served: Vec<Tokens>,
    run: Run,
}

/// Runs one policy on one seed. `None`: stopped.
pub fn run(trace: &Trace, setting: &Setting, policy: &Policy, seed: u64, control: &Control) -> Option<Run> {
    let fleet = policy.fleet(setting);
    let mut world = World {
        setting,
        trace,
        work: Workload::new(trace, setting, seed),
        served: vec![0; fleet.ds.len()],
        fleet,
        router: policy.router(setting),
        heap: BinaryHeap::new(),
        arrivals: BinaryHeap::new(),
        shift: 0,
        order: 0,
        seen: HashSet::default(),
        open: 0,
        next_window: WINDOW_US,
        run: Run::default(),
    };
    for (at, live) in world.work.begin() {
        world.arrive_at(at, live);
    }
    while let Some((at, tick)) = world.next() {
        world.window(at);
        world.fleet.now = at;
        world.happen(tick, control);
        world.digest();
        if control.stop.load(Ordering::Relaxed) {
            return None;
        }
    }
    Some(world.finish())
}

impl World<'_> {
    fn arrive_at(&mut self, at: u64, live: usize) {
        self.order += 1;
        self.arrivals.push(Reverse((at + self.shift, self.order, Tick::Arrival(live))));
    }

    /// The next event; long idle time of the whole system is skipped.
    fn next(&mut self) -> Option<(u64, Tick)> {
        let arrival = self.arrivals.peek().map(|Reverse((at, ..))| at - self.shift);
        let event = self.heap.peek().map(|Reverse((at, ..))| *at);
        match (arrival, event) {
            (Some(a), Some(e)) if e <= a => self.heap.pop().map(|Reverse((at, _, tick))| (at, tick)),
            (None, _) => self.heap.pop().map(|Reverse((at, _, tick))| (at, tick)),
            (Some(arrival), _) => {
                let latest = self.fleet.now + self.setting.lab.idle_cap_ms * 1000;
                let mut at = arrival;
                if self.open == 0 && arrival > latest {
                    self.shift += arrival - latest;
                    at = latest;
                }
                self.arrivals.pop().map(|Reverse((_, _, tick))| (at, tick))
            }
        }
    }

    fn happen(&mut self, tick: Tick, control: &Control) {
        match tick {
            Tick::Arrival(live) => {
                control.turns.fetch_add(1, Ordering::Relaxed);
                let job = self.send(live);
                if self.fits(job) {
                    self.router.arrive(&mut self.fleet, job);
                } else {
                    self.refuse(job, Refused::TooLarge);
                }
            }
            Tick::Step(d, generation) => self.fleet.step(d, generation),
            Tick::Computed(p) => self.fleet.computed(p),
            Tick::Landed(job) => self.fleet.landed(job),
            Tick::Pushed(push) => self.fleet.pushed(push),
            Tick::Deadline(job) => self.router.deadline(&mut self.fleet, job),
            Tick::Retry(job) => self.router.arrive(&mut self.fleet, job),
            Tick::Nudge(d) => self.fleet.nudge(d),
        }
    }

    /// Tells the router what happened, takes what it decided, until nothing is left.
    fn digest(&mut self) {
        loop {
            for (at, tick) in std::mem::take(&mut self.fleet.due) {
                self.order += 1;
                self.heap.push(Reverse((at, self.order, tick)));
            }
            for (job, why) in self.router.take_refused() {
                self.refused(job, why);
            }
            match self.fleet.notices.pop_front() {
                Some(Notice::Done(job)) => {
                    self.router.done(&mut self.fleet, job);
                    self.done(job);
                }
                Some(Notice::Freed(d)) => self.router.freed(&mut self.fleet, d),
                None if self.fleet.due.is_empty() => break,
                None => {}
            }
        }
    }

    /// Whether some worker could hold prompt and answer when empty: the same turns for every policy.
    fn fits(&self, job: JobId) -> bool {
        let j = &self.fleet.jobs[job];
        j.length().next_multiple_of(self.fleet.block()) <= self.fleet.pool()
    }

    fn send(&mut self, live: usize) -> JobId {
        let sent = self.work.send(live);
        let l = &self.work.lives[live];
        let spec = &self.trace.sessions[l.session].turns[l.turn];
        let kept = common_prefix(&l.committed, &sent.chain) as Tokens * self.fleet.block();
        let job = Job {
            live,
            session: l.id.clone(),
            turn: l.served,
            chain: sent.chain,
            full: sent.full,
            input: spec.input,
            output: spec.output,
            append: spec.input.saturating_sub(kept),
            stop: spec.stop,
            arrival: self.fleet.now,
            measured: sent.measured,
            key: (l.session, l.turn),
            reserve: spec.output,
            plan: None,
            request_id: String::new(),
            held: 0,
            restored: 0,
            computed_p: 0,
            computed_d: 0,
            moved: 0,
            abandoned: false,
            first_token: 0,
            backlog: 0,
            refusals: 0,
            held_p: 0,
        };
        self.fleet.jobs.push(job);
        self.open += 1;
        self.run.turns += 1;
        self.fleet.jobs.len() - 1
    }

    fn refused(&mut self, job: JobId, why: Refused) {
        let waited = self.fleet.now - self.fleet.jobs[job].arrival;
        if why != Refused::TooLarge && waited < self.setting.lab.give_up_ms * 1000 {
            self.run.rejects[why as usize] += 1;
            self.fleet.jobs[job].refusals += 1;
            let at = self.fleet.now + self.setting.lab.retry_ms * 1000;
            self.fleet.due.push((at, Tick::Retry(job)));
            return;
        }
        self.refuse(job, why);
    }

    fn refuse(&mut self, job: JobId, why: Refused) {
        self.run.rejects[why as usize] += 1;
        self.record(job, Err(why));
        self.over(job, false);
    }

    fn done(&mut self, job: JobId) {
        if let Some(plan) = self.fleet.jobs[job].plan {
            self.record(job, Ok((plan.mode, plan.rung)));
        }
        self.over(job, true);
    }

    fn over(&mut self, job: JobId, served: bool) {
        self.open -= 1;
        let j = &mut self.fleet.jobs[job];
        let (live, full, empty) = (j.live, j.full.clone(), std::sync::Arc::from(Vec::new()));
        // The chains are the bulk of the memory of a run.
        j.chain = std::sync::Arc::clone(&empty);
        j.full = empty;
        if served {
            let known = full.partition_point(|b| self.seen.contains(b));
            self.seen.extend(&full[known..]);
        }
        let (arrivals, ended) = self.work.over(live, served.then_some(full), self.fleet.now);
        for (at, live) in arrivals {
            self.arrive_at(at, live);
        }
        if ended && self.setting.lab.end_frees {
            let id = self.work.lives[live].id.clone();
            self.fleet.end_session(&id);
        }
    }

    fn record(&mut self, job: JobId, served: Result<(Mode, Rung), Refused>) {
        let j = &self.fleet.jobs[job];
        if !j.measured {
            return;
        }
        let ideal = j.chain.partition_point(|b| self.seen.contains(b)) as Tokens * self.fleet.block();
        self.run.records.push(TurnRecord {
            key: j.key,
            served,
            input: j.input,
            output: j.output,
            computed_p: j.computed_p,
            computed_d: j.computed_d,
            ideal: ideal.min(j.input),
            eligible: j.turn > 0 && j.append <= self.setting.kvc.tau_append,
            abandoned: j.abandoned,
            moved: j.moved,
            ttft: j.first_token.saturating_sub(j.arrival),
            e2e: self.fleet.now - j.arrival,
            refusals: j.refusals,
        });
    }

    /// Closes load windows that end before `at`.
    fn window(&mut self, at: u64) {
        while at >= self.next_window {
            let total: Vec<Tokens> = self.fleet.ds.iter().map(|d| d.served).collect();
            let served = total.iter().zip(&self.served).map(|(a, b)| a - b).collect();
            self.served = total;
            self.run.windows.push(Window {
                at: self.next_window,
                full: self.work.live_lanes() == self.work.lanes(),
                served,
                running: self.fleet.ds.iter().map(|d| d.running()).collect(),
            });
            self.next_window += WINDOW_US;
        }
    }

    fn accesses(&self) -> Vec<Access> {
        let tau = self.setting.kvc.tau_append;
        let served = self.fleet.jobs.iter().filter(|j| j.first_token > 0);
        served
            .map(|j| Access {
                session: j.live,
                worker: j.plan.map_or(0, |p| p.decode),
                input: j.input,
                prefix: j.input - j.append,
                length: j.length(),
                counts: j.measured && j.turn > 0 && j.append <= tau,
            })
            .collect()
    }

    fn finish(mut self) -> Run {
        self.run.accesses = self.accesses();
        for d in &self.fleet.ds {
            self.run.evicted += d.ledger.evicted();
            for (all, one) in self.run.itl.iter_mut().zip(&d.itl) {
                all.merge(one);
            }
        }
        self.run.sync = std::mem::take(&mut self.fleet.sync.figures);
        self.run.theorem_4 = self.fleet.theorem_4;
        self.run.stuck = self.open as u64;
        let span = self.fleet.now.max(1) as f64;
        self.run.prefill_busy = self.fleet.ps.iter().map(|p| p.busy as f64 / span).collect();
        self.run
    }
}
