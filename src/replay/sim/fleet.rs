//! The simulated fleet: executes plans, whoever made them. Policies decide, this computes and moves KV.
//!
//! A turn enters its D (`Fleet::enter`: room in the pool, then restore or local prefill) at once, or after a P
//! has computed it and the KV has landed. Links are serial: a P's egress, a D's ingress, a host's bus.

use std::collections::VecDeque;

use super::decode::{Decode, Outcome};
use super::job::{Job, JobId, Plan};
use super::prefill::Prefill;
use super::sync::{PushId, Sync};
use crate::core::cost::CostModel;
use crate::core::ledger::{AdmitRequest, Ledger, LedgerEvent, StartError};
use crate::core::options::{D2pTrigger, Options};
use crate::core::staleness::BackupStore;
use crate::core::sync::SyncRule;
use crate::core::types::{BlockHash, Mode, SessionId, StopKind, Tokens};
use crate::replay::settings::Lab;

/// A thing that happens later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tick {
    /// A live session sends its next turn.
    Arrival(usize),
    /// A D's step or decode ends; void when the generation moved on.
    Step(usize, u64),
    /// A P's batch is computed.
    Computed(usize),
    /// KV from a P, a backup or host memory has reached the D.
    Landed(JobId),
    /// A push from a D has reached its P.
    Pushed(PushId),
    /// A turn's deadline in the wait queue.
    Deadline(JobId),
    /// A client repeats a turn that was answered 429.
    Retry(JobId),
    /// An idle D looks again whether a waiting turn fits: promises that block it may have expired.
    Nudge(usize),
}

/// What the fleet tells the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// The answer is complete and committed.
    Done(JobId),
    /// Room was released at a D.
    Freed(usize),
}

/// See the module.
#[derive(Debug)]
pub struct Fleet {
    /// The machine.
    pub cost: CostModel,
    /// The lab's knobs.
    pub lab: Lab,
    /// Options the ledgers run with.
    pub options: Options,
    /// A turn takes its room at D before it enters a P: leases wait for a P, so no P may wait for a lease.
    pub room_first: bool,
    /// Now, in µs.
    pub now: u64,
    /// All turns so far.
    pub jobs: Vec<Job>,
    /// D or fused workers.
    pub ds: Vec<Decode>,
    /// P workers.
    pub ps: Vec<Prefill>,
    /// To be scheduled by the world.
    pub due: Vec<(u64, Tick)>,
    /// To be told to the policy and the world.
    pub notices: VecDeque<Notice>,
    /// Pushes from D to P.
    pub sync: Sync,
    /// Restores within β, and those that cost more than Theorem 4 allows.
    pub theorem_4: (u64, u64),
    outcomes: Vec<Outcome>,
}

impl Fleet {
    /// An idle fleet of `p` + `d` workers with `kv_tokens` each.
    pub fn new(p: usize, d: usize, kv_tokens: Tokens, options: Options, cost: CostModel, lab: Lab) -> Self {
        let hosts = if p > 0 { p } else { d };
        let host = options.blocks(lab.host_tokens / hosts.max(1) as Tokens);
        // A P caches like any engine, whatever preset the router runs.
        let engine = Options { block_tokens: options.block_tokens, ..Options::production() };
        // P's own memory is one budget: what is set aside for backups is not there for prompts.
        let aside = match options.d2p_trigger {
            D2pTrigger::Off => 0,
            _ => (kv_tokens as f64 * lab.backup_share) as Tokens,
        };
        let prefill = || {
            let pool = Ledger::new(engine.clone(), kv_tokens - aside, 1);
            Prefill::new(pool, BackupStore::new(host + options.blocks(aside)))
        };
        let decode = || {
            let host = if p > 0 { 0 } else { host };
            Decode::new(Ledger::new(options.clone(), kv_tokens, 1), BackupStore::new(host))
        };
        Self {
            ds: (0..d).map(|_| decode()).collect(),
            ps: (0..p).map(|_| prefill()).collect(),
            sync: Sync::new(SyncRule::of(&options)),
            cost,
            lab,
            room_first: false,
            options,
            now: 0,
            jobs: Vec::new(),
            due: Vec::new(),
            notices: VecDeque::new(),
            theorem_4: (0, 0),
            outcomes: Vec::new(),
        }
    }

    /// Tokens per block.
    pub fn block(&self) -> Tokens {
        self.options.block_tokens.into()
    }

    /// Now in the core's unit.
    pub fn now_ms(&self) -> u64 {
        self.now / 1000
    }

    /// The whole pool of a worker in tokens.
    pub fn pool(&self) -> Tokens {
        self.ds.first().map_or(0, |d| d.ledger.pool_blocks() as Tokens) * self.block()
    }

    /// What a ledger is asked for a job.
    pub fn request(&self, job: JobId, request_id: String, output_reserve: Tokens) -> AdmitRequest {
        let j = &self.jobs[job];
        AdmitRequest {
            request_id,
            session: j.session.clone(),
            turn: j.turn,
            chain: j.chain.clone(),
            input_len: j.input,
            output_reserve,
        }
    }

    /// Starts a turn.
    pub fn dispatch(&mut self, job: JobId, plan: Plan) {
        self.note_abandoned(job, plan.decode);
        self.measure_sync(job);
        if let Some(p) = plan.prefill {
            self.sync.met(&self.jobs[job].session, p);
        }
        let j = &mut self.jobs[job];
        j.plan = Some(plan);
        if !plan.admitted {
            j.request_id = format!("{job}!{}", j.refusals);
        }
        match plan.prefill {
            Some(p) if plan.rung.uses_prefill() && !self.room_first => self.enter_prefill(job, p),
            _ => self.enter(job),
        }
    }

    /// A move abandons residency when another D holds at least half of the session's context.
    fn note_abandoned(&mut self, job: JobId, to: usize) {
        let block = self.block();
        let j = &self.jobs[job];
        let context = j.input.saturating_sub(j.append);
        let held = |d: &Decode| d.ledger.residency().own_prefix(&j.session, &j.chain) as Tokens * block;
        let here = held(&self.ds[to]);
        let there = self.ds.iter().enumerate().filter(|(d, _)| *d != to).map(|(_, d)| held(d)).max();
        self.jobs[job].abandoned =
            context > 0 && there.is_some_and(|there| 2 * there >= context && 2 * here < context);
    }

    /// Enters the D: room first.
    pub(super) fn enter(&mut self, job: JobId) {
        let Some(plan) = self.jobs[job].plan else { return };
        if !self.try_enter(job, plan) {
            self.ds[plan.decode].waiting.push_back(job);
            self.nudge_later(plan.decode);
        }
    }

    fn nudge_later(&mut self, d: usize) {
        if self.ds[d].running() == 0 && !self.ds[d].waiting.is_empty() {
            self.due.push((self.now + 1_000_000, Tick::Nudge(d)));
        }
    }

    /// Nobody runs at a D where turns wait: see [`Tick::Nudge`].
    pub fn nudge(&mut self, d: usize) {
        self.freed(d);
    }

    fn try_enter(&mut self, job: JobId, plan: Plan) -> bool {
        let now = self.now_ms();
        let id = self.jobs[job].request_id.clone();
        let ledger = &mut self.ds[plan.decode].ledger;
        let started = if plan.admitted { ledger.start(&id, now) } else { Err(StartError::NoLease) };
        let started = match started {
            Err(StartError::NoLease) => {
                // Never admitted, or the promise expired in P's queue: the engine takes it when it has room.
                self.jobs[job].request_id = if plan.admitted { format!("{id}+") } else { id };
                let request = self.request(job, self.jobs[job].request_id.clone(), self.jobs[job].output);
                self.ds[plan.decode].ledger.force(&request, now)
            }
            other => other,
        };
        self.drain(plan.decode);
        let Ok(reuse) = started else { return false };
        let held = Tokens::from(reuse) * self.block();
        self.jobs[job].held = held.min(self.jobs[job].input);
        match plan.prefill {
            Some(p) if plan.rung.uses_prefill() && self.room_first => self.enter_prefill(job, p),
            _ => self.fetch(job, plan, reuse as usize),
        }
        true
    }

    /// Brings the KV that is computed elsewhere; then the rest is computed here.
    pub(super) fn fetch(&mut self, job: JobId, plan: Plan, reuse: usize) {
        let block = self.block();
        let missing = self.jobs[job].input - self.jobs[job].held;
        match (plan.rung.uses_prefill(), plan.prefill) {
            (true, Some(p)) => {
                self.jobs[job].moved = missing;
                self.send(job, p, plan.decode, missing);
            }
            (_, source) => {
                let chain = self.jobs[job].chain.clone();
                let blocks = self.restorable(source, plan.decode, &chain, reuse);
                if blocks == 0 {
                    return self.append(job, plan.decode);
                }
                let range = &chain[reuse..reuse + blocks];
                let tokens = (blocks as Tokens * block).min(missing.saturating_sub(1));
                self.jobs[job].restored = tokens;
                self.check_theorem_4(job);
                match source {
                    Some(p) => {
                        self.ps[p].host.touch(range);
                        self.jobs[job].moved = tokens;
                        self.send(job, p, plan.decode, tokens);
                    }
                    None => {
                        self.ds[plan.decode].host.touch(range);
                        let us = (self.cost.host_ms(tokens) * 1000.0).round() as u64;
                        let d = &mut self.ds[plan.decode];
                        d.host_free = d.host_free.max(self.now) + us;
                        self.due.push((d.host_free, Tick::Landed(job)));
                    }
                }
            }
        }
    }

    /// Blocks of `chain` from `from` on that a P (pool or host memory) or the worker's own host can deliver.
    pub fn restorable(&self, source: Option<usize>, d: usize, chain: &[BlockHash], from: usize) -> usize {
        let Some(p) = source else { return self.ds[d].host.run(&chain[from..]) };
        // What a pool holds of a chain is a prefix of it.
        let pool = self.ps[p].ledger.residency().prefix(chain).max(from);
        pool - from + self.ps[p].host.run(&chain[pool..])
    }

    fn send(&mut self, job: JobId, p: usize, d: usize, tokens: Tokens) {
        let us = (self.cost.transfer_ms(tokens) * 1000.0).round() as u64;
        let begin = self.now.max(self.ps[p].link_free).max(self.ds[d].link_free);
        self.ps[p].link_free = begin + us;
        self.ds[d].link_free = begin + us;
        self.due.push((begin + us, Tick::Landed(job)));
    }

    /// KV has reached the D.
    pub fn landed(&mut self, job: JobId) {
        let Some(plan) = self.jobs[job].plan else { return };
        let Some(p) = plan.prefill.filter(|_| plan.rung.uses_prefill()) else {
            return self.append(job, plan.decode);
        };
        let (now, j) = (self.now_ms(), &self.jobs[job]);
        let whole = j.chain.len();
        self.ps[p].ledger.commit(&format!("p{job}"), &j.chain[..whole], j.input, StopKind::EndTurn, now);
        self.keep_evicted_p(p);
        self.next_batch(p);
        self.settle(plan.decode);
        self.jobs[job].first_token = self.now;
        self.grow(job, plan.decode);
        let (context, output) = (self.jobs[job].input, self.jobs[job].output);
        let mode = self.mode(job);
        if self.ds[plan.decode].join(job, context, output, mode) {
            self.finish(job, plan.decode);
        }
        self.replan(plan.decode);
    }

    /// D computes what is missing; the last token always, for its logits.
    fn append(&mut self, job: JobId, d: usize) {
        let j = &mut self.jobs[job];
        let have = (j.held + j.restored).min(j.input - 1);
        j.computed_d = j.input - have;
        let (new, output) = (j.computed_d, j.output);
        self.settle(d);
        self.grow(job, d);
        let mode = self.mode(job);
        self.ds[d].append(job, have, new, output, mode);
        self.replan(d);
    }

    /// Makes the reservation as long as the answer will be.
    fn grow(&mut self, job: JobId, d: usize) {
        let j = &self.jobs[job];
        let blocks = j.length().div_ceil(self.block()).saturating_sub(j.held / self.block());
        self.ds[d].ledger.grow(&j.request_id, blocks as usize);
        self.drain(d);
    }

    /// Index of the mode a job counts under.
    fn mode(&self, job: JobId) -> Option<usize> {
        let j = &self.jobs[job];
        let mode = j.plan.map_or(Mode::Fallback, |p| p.mode);
        j.measured.then_some(mode as usize)
    }

    /// A D's planned event is due.
    pub fn step(&mut self, d: usize, generation: u64) {
        if self.ds[d].generation == generation {
            self.settle(d);
            self.replan(d);
        }
    }

    fn settle(&mut self, d: usize) {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        self.ds[d].settle(self.now, &mut outcomes);
        for outcome in outcomes.drain(..) {
            match outcome {
                Outcome::First(job) => self.jobs[job].first_token = self.now,
                Outcome::Done(job) => self.finish(job, d),
            }
        }
        self.outcomes = outcomes;
    }

    fn replan(&mut self, d: usize) {
        if let Some(at) = self.ds[d].plan(self.now, &self.cost) {
            self.due.push((at, Tick::Step(d, self.ds[d].generation)));
        }
    }

    fn finish(&mut self, job: JobId, d: usize) {
        let now = self.now_ms();
        let j = &self.jobs[job];
        let stop = if self.lab.plain_lru { StopKind::EndTurn } else { j.stop };
        let worker = &mut self.ds[d];
        worker.ledger.commit(&j.request_id, &j.full, j.length(), stop, now);
        worker.served += j.length();
        if self.pushes_commits() {
            let fresh = j.held / self.block();
            let (session, full) = (j.session.clone(), j.full.clone());
            self.push(d, &session, full[fresh as usize..].iter().rev().copied().collect());
        }
        self.drain(d);
        self.notices.push_back(Notice::Done(job));
        self.freed(d);
    }

    /// What a D drops goes to its backup, as the trigger says.
    pub fn drain(&mut self, d: usize) {
        let pushes = self.pushes_drops();
        // An eviction says what a session keeps, and then what nobody holds any more.
        let mut evicted = None;
        for event in self.ds[d].ledger.take_events() {
            match event {
                LedgerEvent::Held(change) => evicted = change.appended.is_empty().then_some(change.session),
                LedgerEvent::Freed(mut blocks) if pushes => {
                    let idle = evicted.take().filter(|session| !self.ds[d].ledger.is_busy(session));
                    if let Some(session) = idle {
                        blocks.reverse();
                        self.push(d, &session, blocks);
                    }
                }
                _ => {}
            }
        }
    }

    /// Gives back a lease that is not used.
    pub fn release(&mut self, d: usize, request_id: &str) {
        let now = self.now_ms();
        self.ds[d].ledger.release(request_id, now);
        self.drain(d);
        self.freed(d);
    }

    /// A session ended and its client said so.
    pub fn end_session(&mut self, session: &SessionId) {
        for d in 0..self.ds.len() {
            self.ds[d].ledger.end_session(session);
            self.ds[d].ledger.take_events();
        }
    }

    /// Room was released: turns waiting at the engine first, then whoever the policy holds.
    fn freed(&mut self, d: usize) {
        while let Some(&job) = self.ds[d].waiting.front() {
            let Some(plan) = self.jobs[job].plan else { break };
            if !self.try_enter(job, plan) {
                break;
            }
            self.ds[d].waiting.pop_front();
        }
        self.nudge_later(d);
        self.notices.push_back(Notice::Freed(d));
    }
}
