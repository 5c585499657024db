//! `kvc`, `kvc-paper`, `kvc-fused`: our own core. This file only drives [`crate::core::turn`], as the actors of
//! the live router do: it gathers, asks ledgers, keeps the wait queue, and hands plans to the fleet.

use std::collections::{HashMap, VecDeque};

use super::Router;
use crate::core::dispatch::RoundRobin;
use crate::core::ledger::{AdmitReply, LoadReport};
use crate::core::options::Options;
use crate::core::queue::{Pushed, WaitQueue};
use crate::core::route::{Ask, Candidate, PrefillView, SessionState, overlap};
use crate::core::turn::{Answer, Command, Commands, Dispatch, Event, Refused, Rules, Turn};
use crate::core::types::{SessionId, Tokens, WorkerId};
use crate::replay::settings::Setting;
use crate::replay::sim::fleet::{Fleet, Tick};
use crate::replay::sim::job::{JobId, Plan};

/// A session counts as living on its pin until it has been quiet for this long, in µs.
const PIN_LIFE_US: u64 = 600_000_000;
/// Waiting turns woken by one release.
const WAKES: usize = 16;

type Rejects = smallvec::SmallVec<[(WorkerId, u32); 2]>;

#[derive(Debug, Default)]
struct Session {
    state: SessionState,
    /// Worker and tokens it is counted with.
    pinned: Option<(usize, Tokens)>,
    seen: u64,
    /// Learned answer length.
    output: f64,
}

#[derive(Debug)]
struct Waiting {
    since: u64,
    work: Tokens,
    /// D it was last rejected by, for the one-queue-per-worker ablation.
    worker: Option<WorkerId>,
}

/// See the module.
#[derive(Debug)]
pub struct Kvc {
    options: Options,
    per_worker: bool,
    keep_rejects: bool,
    sessions: HashMap<SessionId, Session>,
    quiet: VecDeque<(u64, SessionId)>,
    turns: HashMap<JobId, Turn>,
    queue: WaitQueue<JobId>,
    /// Put out of a full queue, and not told yet.
    displaced: Vec<JobId>,
    waits: HashMap<JobId, Waiting>,
    waking: bool,
    rr: RoundRobin,
    inflight: Vec<u32>,
    assigned: Vec<u64>,
    pinned: Vec<Tokens>,
    refused: Vec<(JobId, Refused)>,
    /// Learned answer length of all sessions.
    output: f64,
}

impl Kvc {
    /// A router with these options.
    pub fn new(options: Options, setting: &Setting) -> Self {
        Self {
            displaced: Vec::new(),
            queue: WaitQueue::new(options.queue_turns as usize, options.queue_deadline_ms),
            options,
            per_worker: setting.lab.queue_per_worker,
            keep_rejects: setting.lab.keep_rejects,
            sessions: HashMap::new(),
            quiet: VecDeque::new(),
            turns: HashMap::new(),
            waits: HashMap::new(),
            waking: false,
            rr: RoundRobin::default(),
            inflight: Vec::new(),
            assigned: Vec::new(),
            pinned: Vec::new(),
            refused: Vec::new(),
            output: 300.0,
        }
    }

    /// Answers a turn's commands until it runs, waits or is refused.
    fn drive(&mut self, fleet: &mut Fleet, job: JobId, mut commands: Commands) {
        let cost = fleet.cost.clone();
        let Some(mut turn) = self.turns.remove(&job) else { return };
        let mut state = self.sessions.entry(fleet.jobs[job].session.clone()).or_default().state.clone();
        let mut over = false;
        while !commands.is_empty() {
            let mut next = Commands::new();
            for command in commands {
                let Some(event) = self.answer(fleet, job, command, &mut over) else { continue };
                let options = self.options.clone();
                let rules = Rules { options: &options, cost: &cost };
                let before = self.keep_rejects.then(|| state.rejects.clone());
                next = match event {
                    Reply::Fleet(decode, prefill) => {
                        turn.step(&mut state, Event::Fleet { decode: &decode, prefill: &prefill }, rules)
                    }
                    Reply::Event(event) => turn.step(&mut state, event, rules),
                };
                restore(&mut state, before);
            }
            commands = next;
        }
        if let Some(session) = self.sessions.get_mut(&fleet.jobs[job].session) {
            session.state = state;
        }
        if !over {
            self.turns.insert(job, turn);
        }
    }

    fn answer(&mut self, fleet: &mut Fleet, job: JobId, command: Command, over: &mut bool) -> Option<Reply> {
        match command {
            Command::Gather => Some(Reply::Fleet(self.candidates(fleet, job), prefills(fleet, job))),
            Command::Admit { worker, attempt } => {
                Some(Reply::Event(Event::Answer(self.admit(fleet, job, worker, attempt))))
            }
            Command::PickPrefill => {
                let picked = self.rr.pick_prefill(&prefills(fleet, job), &self.options);
                Some(Reply::Event(Event::Prefill(picked)))
            }
            Command::PickFallback => {
                let ids: Vec<WorkerId> = (0..fleet.ds.len()).map(|d| WorkerId(d as u32)).collect();
                let (prefill, decode) = self.rr.pick_fallback(&prefills(fleet, job), &ids, &self.options)?;
                Some(Reply::Event(Event::FallbackPair { prefill, decode }))
            }
            Command::Wait { work } => {
                let since = self.waits.get(&job).map_or(fleet.now_ms(), |w| w.since);
                match self.queue.push(job, &fleet.jobs[job].session, work, since) {
                    Pushed::Waits => {}
                    Pushed::Full => return Some(Reply::Event(Event::WaitOver)),
                    // It is told when its deadline passes, in this moment.
                    Pushed::InPlaceOf(other) => {
                        self.displaced.push(other);
                        fleet.due.push((fleet.now, Tick::Deadline(other)));
                    }
                }
                if !self.waits.contains_key(&job) {
                    let at = fleet.now + self.options.queue_deadline_ms * 1000;
                    fleet.due.push((at, Tick::Deadline(job)));
                }
                let session = self.sessions.get(&fleet.jobs[job].session);
                let worker = session.and_then(|s| s.state.pin);
                self.waits.insert(job, Waiting { since, work, worker });
                None
            }
            Command::Dispatch(plan) => {
                self.dispatch(fleet, job, plan);
                None
            }
            Command::Release { worker, attempt } => {
                let round = fleet.jobs[job].refusals;
                fleet.release(worker.0 as usize, &format!("{job}.{round}.{attempt}"));
                None
            }
            Command::Refuse(why) => {
                self.waits.remove(&job);
                self.refused.push((job, why));
                *over = true;
                None
            }
        }
    }

    fn admit(&mut self, fleet: &mut Fleet, job: JobId, worker: WorkerId, attempt: u32) -> Answer {
        let j = &fleet.jobs[job];
        // The attempt numbers of a repeated turn start again: the refusals tell the rounds apart.
        let request = fleet.request(job, format!("{job}.{}.{attempt}", j.refusals), j.reserve);
        let now = fleet.now_ms();
        match fleet.ds[worker.0 as usize].ledger.admit(&request, now) {
            AdmitReply::Admitted { mode, reuse_blocks, terms, .. } => {
                fleet.jobs[job].request_id = request.request_id;
                fleet.drain(worker.0 as usize);
                Answer::Admitted { mode, reuse_blocks, terms: Some(terms) }
            }
            AdmitReply::Rejected { reason, terms } => Answer::Rejected { reason, terms: Some(terms) },
            AdmitReply::Stale => Answer::Silent,
        }
    }

    fn dispatch(&mut self, fleet: &mut Fleet, job: JobId, plan: Dispatch) {
        let d = plan.decode.0 as usize;
        self.waits.remove(&job);
        self.inflight[d] += 1;
        self.assigned[d] += 1;
        let session = fleet.jobs[job].session.clone();
        self.live_on(&session, d, fleet.jobs[job].input, fleet.now);
        let plan = Plan {
            mode: plan.mode,
            rung: plan.rung,
            prefill: plan.prefill.map(|p| p.0 as usize),
            decode: d,
            admitted: plan.admitted,
        };
        fleet.dispatch(job, plan);
    }

    /// Counts a session's tokens at the worker it lives on.
    fn live_on(&mut self, id: &SessionId, worker: usize, tokens: Tokens, now: u64) {
        let Some(session) = self.sessions.get_mut(id) else { return };
        if let Some((old, n)) = session.pinned.replace((worker, tokens)) {
            self.pinned[old] -= n;
        }
        self.pinned[worker] += tokens;
        session.seen = now;
        self.quiet.push_back((now, id.clone()));
    }

    /// Sessions that have been quiet for long live nowhere.
    fn forget_quiet(&mut self, now: u64) {
        while self.quiet.front().is_some_and(|(seen, _)| seen + PIN_LIFE_US < now) {
            let Some((seen, id)) = self.quiet.pop_front() else { break };
            let Some(session) = self.sessions.get_mut(&id).filter(|s| s.seen == seen) else { continue };
            if let Some((worker, tokens)) = session.pinned.take() {
                self.pinned[worker] -= tokens;
            }
        }
    }

    fn candidates(&mut self, fleet: &Fleet, job: JobId) -> Vec<Candidate> {
        self.forget_quiet(fleet.now);
        let j = &fleet.jobs[job];
        let own = self.sessions.get(&j.session).and_then(|s| s.pinned);
        let each = fleet.ds.iter().enumerate().map(|(i, d)| {
            let residency = d.ledger.residency();
            let load = LoadReport {
                running: d.running(),
                waiting: d.waiting.len() as u32,
                queued_tokens: d.queued(),
                ..d.ledger.load()
            };
            let own = own.filter(|(w, _)| *w == i).map_or(0, |(_, n)| n);
            Candidate {
                id: WorkerId(i as u32),
                overlap: overlap(&j.chain, residency, &self.options),
                resident: residency.get(&j.session).map_or(0, |h| h.tokens),
                inflight: self.inflight[i],
                assigned: self.assigned[i],
                load: Some(load),
                pinned_tokens: self.pinned[i] - own,
                warm: 1.0,
                backup: fleet.backup(i, job),
            }
        });
        each.collect()
    }

    fn step(&mut self, fleet: &mut Fleet, job: JobId, event: Event<'_>) {
        let session = self.sessions.entry(fleet.jobs[job].session.clone()).or_default();
        let Some(turn) = self.turns.get_mut(&job) else { return };
        let rules = Rules { options: &self.options, cost: &fleet.cost };
        let before = self.keep_rejects.then(|| session.state.rejects.clone());
        let commands = turn.step(&mut session.state, event, rules);
        restore(&mut session.state, before);
        self.drive(fleet, job, commands);
    }

    /// Output tokens to reserve: what this session's answers usually need.
    fn reserve(&self, fleet: &Fleet, job: JobId) -> Tokens {
        let j = &fleet.jobs[job];
        let learned = self.sessions.get(&j.session).map_or(0.0, |s| s.output).max(self.output);
        let room = fleet.pool().saturating_sub(j.input);
        ((1.5 * learned) as Tokens).clamp(64, 4096).min(room)
    }
}

/// Undoes a reset of reject counters.
fn restore(state: &mut SessionState, before: Option<Rejects>) {
    for (worker, n) in before.into_iter().flatten() {
        if state.rejects(worker) < n {
            state.reset(worker);
            state.rejects.push((worker, n));
        }
    }
}

enum Reply {
    Fleet(Vec<Candidate>, Vec<PrefillView>),
    Event(Event<'static>),
}

fn prefills(fleet: &Fleet, job: JobId) -> Vec<PrefillView> {
    let view = |p: usize| PrefillView {
        id: WorkerId(p as u32),
        backlog: fleet.ps[p].backlog,
        held: fleet.held_p(p, job),
    };
    (0..fleet.ps.len()).map(view).collect()
}

impl Router for Kvc {
    fn arrive(&mut self, fleet: &mut Fleet, job: JobId) {
        self.inflight.resize(fleet.ds.len(), 0);
        self.assigned.resize(fleet.ds.len(), 0);
        self.pinned.resize(fleet.ds.len(), 0);
        fleet.jobs[job].reserve = self.reserve(fleet, job);
        let j = &fleet.jobs[job];
        let ask = Ask { turn: j.turn, input_len: j.input, append_len: j.append };
        self.turns.insert(job, Turn::new(ask, j.reserve));
        self.step(fleet, job, Event::Begin);
    }

    fn done(&mut self, fleet: &mut Fleet, job: JobId) {
        let j = &fleet.jobs[job];
        let (output, length, id, now) = (j.output as f64, j.length(), j.session.clone(), fleet.now);
        let Some(d) = j.plan.map(|p| p.decode) else { return };
        self.inflight[d] -= 1;
        self.output += 0.02 * (output - self.output);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.output += 0.3 * (output - session.output);
        }
        self.live_on(&id, d, length, now);
        let resident = fleet.ds[d].ledger.residency().get(&id).is_some();
        self.step(fleet, job, Event::Finished { resident });
        self.turns.remove(&job);
    }

    fn freed(&mut self, fleet: &mut Fleet, worker: usize) {
        // A wake that fails gives room back itself and must not start another round.
        if self.waking || self.queue.is_empty() {
            return;
        }
        self.waking = true;
        let mut again = Vec::new();
        for _ in 0..WAKES.min(self.queue.len()) {
            let Some(job) = self.queue.pop(fleet.now_ms(), |_| true) else { break };
            let elsewhere = self.waits.get(&job).is_some_and(|w| w.worker != Some(WorkerId(worker as u32)));
            if self.per_worker && elsewhere {
                again.push(job);
                continue;
            }
            let before = self.queue.len();
            self.step(fleet, job, Event::RoomFreed);
            if self.queue.len() > before {
                // Back in the queue: keep it out of this round.
                self.queue.remove(&job);
                again.push(job);
            }
        }
        for job in again {
            if let Some(wait) = self.waits.get(&job) {
                self.queue.back(job, &fleet.jobs[job].session, wait.work, wait.since);
            }
        }
        self.waking = false;
    }

    fn deadline(&mut self, fleet: &mut Fleet, job: JobId) {
        let displaced = self.displaced.iter().position(|other| *other == job);
        if let Some(place) = displaced {
            self.displaced.swap_remove(place);
        }
        if self.queue.remove(&job) || displaced.is_some() {
            self.step(fleet, job, Event::WaitOver);
        }
    }

    fn take_refused(&mut self) -> Vec<(JobId, Refused)> {
        std::mem::take(&mut self.refused)
    }

    fn waiting(&self) -> usize {
        self.queue.len()
    }
}
