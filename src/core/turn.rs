//! The turn machine: Algorithm 3 (Dispatch) with the ladder, the wait queue and re-placement, as
//! `step(event) → commands`. It does no I/O and reads no clock; actors, the replay lab, `explain` and the
//! fault lab drive it and thereby make the same decisions.
//!
//! ```text
//! Begin ─ Gather ─▶ Fleet ─ Admit ─▶ Answer ┬─ admitted ─ [PickPrefill ─▶ Prefill] ─ Dispatch ─▶ Finished
//!                     ▲                      ├─ rejected: next worker (lines 20-23)
//!                     │                      └─ nobody left: Wait ─▶ RoomFreed │ WaitOver, or Fallback (line 26)
//!                     └── Failed before any byte: re-place ◀──────────────────────────┘
//! ```

use smallvec::{SmallVec, smallvec};

use super::cost::{Backup, CostModel, LadderInput, cheapest};
use super::options::{Commit, LargeAppend, Options, Overflow};
use super::route::{Ask, Candidate, PrefillView, SessionState, route};
use super::types::{Mode, RejectReason, Rung, Tokens, WorkerId};

mod words;

pub use words::{Answer, Attempt, Command, Dispatch, Event, Failure, Refused};

/// Re-placements of one request after failures; then it is refused.
const MAX_REPLACED: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    New,
    Gathering,
    Asking { worker: WorkerId, repeated: bool },
    PickingPrefill(Dispatch),
    PickingFallback,
    Waiting,
    Running(Dispatch),
    Over,
}

/// Commands of one step.
pub type Commands = SmallVec<[Command; 2]>;

/// The options and the cost model a machine decides with.
#[derive(Debug, Clone, Copy)]
pub struct Rules<'a> {
    /// The preset.
    pub options: &'a Options,
    /// What work costs.
    pub cost: &'a CostModel,
}

/// One turn on its way.
#[derive(Debug, Clone)]
pub struct Turn {
    ask: Ask,
    output_reserve: Tokens,
    phase: Phase,
    /// D1: asked in this round.
    tried: SmallVec<[WorkerId; 4]>,
    /// Unreachable or busy: not asked again by this request.
    gone: SmallVec<[WorkerId; 2]>,
    /// P workers that failed this request.
    gone_prefill: SmallVec<[WorkerId; 2]>,
    retries: u32,
    attempt: u32,
    waited: bool,
    /// Woken from the wait queue: it asks again for what it was refused already.
    woken: bool,
    replaced: u32,
    /// Workers that did not answer their Admit.
    unanswered: u32,
    /// Times a D answered busy: once it goes elsewhere, then the client is told (never retried blindly).
    busy: u32,
    decode: SmallVec<[Candidate; 4]>,
    prefill: SmallVec<[PrefillView; 2]>,
    attempts: Vec<Attempt>,
}

impl Turn {
    /// A turn that has not begun. `output_reserve`: output tokens Admit is asked to reserve (A5).
    pub fn new(ask: Ask, output_reserve: Tokens) -> Self {
        Self {
            ask,
            output_reserve,
            phase: Phase::New,
            tried: SmallVec::new(),
            gone: SmallVec::new(),
            gone_prefill: SmallVec::new(),
            retries: 0,
            attempt: 0,
            waited: false,
            woken: false,
            replaced: 0,
            unanswered: 0,
            busy: 0,
            decode: SmallVec::new(),
            prefill: SmallVec::new(),
            attempts: Vec::new(),
        }
    }

    /// The turn has been through the wait queue already: nobody left means Fallback or refusal.
    pub fn skip_waiting(&mut self) {
        self.waited = true;
    }

    /// What was asked so far: candidates, scores, answers.
    pub fn attempts(&self) -> &[Attempt] {
        &self.attempts
    }

    /// Output tokens Admit is asked to reserve.
    pub fn output_reserve(&self) -> Tokens {
        self.output_reserve
    }

    /// Whether its time in the wait queue is used up.
    pub fn waited(&self) -> bool {
        self.waited
    }

    /// How often it was placed again after a failure.
    pub fn replaced(&self) -> u32 {
        self.replaced + self.unanswered
    }

    /// The plan that is being executed.
    pub fn running(&self) -> Option<&Dispatch> {
        match &self.phase {
            Phase::Running(plan) => Some(plan),
            _ => None,
        }
    }

    /// The attempt that may have reserved room, and where.
    pub fn reserved(&self) -> Option<(WorkerId, u32)> {
        match self.phase {
            Phase::Asking { worker, .. } => Some((worker, self.attempt)),
            Phase::PickingPrefill(plan) | Phase::Running(plan) if plan.admitted => {
                Some((plan.decode, plan.attempt))
            }
            _ => None,
        }
    }

    /// Takes one event. Events that do not fit the phase (late, duplicated) change nothing.
    pub fn step(&mut self, session: &mut SessionState, event: Event<'_>, rules: Rules<'_>) -> Commands {
        match (self.phase, event) {
            (Phase::Over, _) => Commands::new(),
            (_, Event::Cancelled) => self.cancel(),
            (Phase::New, Event::Begin) => self.gather(),
            (Phase::Waiting, Event::RoomFreed) => {
                self.woken = true;
                self.gather()
            }
            (Phase::Gathering, Event::Fleet { decode, prefill }) => {
                self.decode = decode.iter().filter(|c| !self.gone.contains(&c.id)).copied().collect();
                let left = prefill.iter().filter(|p| !self.gone_prefill.contains(&p.id));
                self.prefill = left.copied().collect();
                self.ask_next(session, rules)
            }
            (Phase::Asking { worker, repeated }, Event::Answer(answer)) => {
                self.answered(session, worker, repeated, answer, rules)
            }
            (Phase::PickingPrefill(plan), Event::Prefill(prefill)) => {
                self.dispatch(Dispatch { prefill, ..plan }, rules)
            }
            (Phase::PickingFallback, Event::FallbackPair { prefill, decode }) => {
                let (prefill, decode) = self.seeing(prefill, decode);
                let rung = if prefill.is_some() { Rung::Full } else { Rung::Local };
                let plan = self.fallback(decode, rung);
                self.dispatch(Dispatch { prefill, ..plan }, rules)
            }
            (Phase::Waiting, Event::WaitOver) => {
                self.waited = true;
                self.overflow(rules)
            }
            (Phase::Running(plan), Event::Failed(fault)) => self.replace(session, plan, fault),
            (Phase::Running(plan), Event::Finished { resident }) => {
                finished(session, &plan, resident, rules.options);
                self.phase = Phase::Over;
                Commands::new()
            }
            _ => Commands::new(),
        }
    }

    /// A new round: every worker may be asked again.
    fn gather(&mut self) -> Commands {
        self.tried.clear();
        self.retries = 0;
        self.phase = Phase::Gathering;
        smallvec![Command::Gather]
    }

    /// Lines 3-6.
    fn ask_next(&mut self, session: &SessionState, rules: Rules<'_>) -> Commands {
        let epsilon = rules.options.epsilon.unwrap_or(self.decode.len() as u32);
        let choice = (self.retries < epsilon)
            .then(|| {
                route(&self.ask, session, &self.tried, &self.decode, &self.prefill, rules.options, rules.cost)
            })
            .flatten();
        let Some(choice) = choice else { return self.overflow(rules) };
        let worker = choice.worker;
        self.attempts.push(Attempt { choice, answer: None });
        self.attempt += 1;
        self.phase = Phase::Asking { worker, repeated: false };
        smallvec![Command::Admit { worker, attempt: self.attempt }]
    }

    /// Lines 7-23.
    fn answered(
        &mut self,
        session: &mut SessionState,
        worker: WorkerId,
        repeated: bool,
        answer: Answer,
        rules: Rules<'_>,
    ) -> Commands {
        if let Some(last) = self.attempts.last_mut() {
            last.answer = Some(answer);
        }
        match answer {
            Answer::Admitted { mode, reuse_blocks, .. } => {
                if !planted!(ResetMissing) {
                    session.reset(worker); // line 8
                }
                if rules.options.commit == Commit::Admit {
                    session.pin = Some(worker); // line 9
                }
                self.admitted(worker, mode, reuse_blocks, rules)
            }
            Answer::Rejected { reason, .. } => {
                if !self.woken {
                    session.bump(worker); // line 21, once per turn: asking again is not another reject
                }
                if planted!(RejectCountedTwice) {
                    session.bump(worker);
                }
                self.tried.push(worker); // line 22
                self.retries += 1; // line 23
                if self.stays(session, worker, reason, rules.options) {
                    return self.overflow(rules);
                }
                self.ask_next(session, rules)
            }
            Answer::Silent if !repeated => {
                self.phase = Phase::Asking { worker, repeated: true };
                smallvec![Command::Admit { worker, attempt: self.attempt }]
            }
            Answer::Silent | Answer::Unreachable => {
                // The request may have had its effect: whatever it reserved is given back.
                let release = Command::Release { worker, attempt: self.attempt };
                self.unanswered += 1;
                self.lose(session, worker);
                let mut commands = self.ask_next(session, rules);
                commands.insert(0, release);
                commands
            }
        }
    }

    /// D7: a session leaves the D that holds it only after `τ_reject` rejects; until then it waits for room there.
    fn stays(
        &self,
        session: &SessionState,
        worker: WorkerId,
        reason: RejectReason,
        options: &Options,
    ) -> bool {
        options.overflow == Overflow::Queue
            && !self.waited
            && reason == RejectReason::NoDCapacity
            && session.pin == Some(worker)
            && session.rejects(worker) < options.tau_reject
    }

    /// Lines 11-19: which rung computes what D lacks.
    fn admitted(&mut self, worker: WorkerId, mode: Mode, reuse_blocks: u32, rules: Rules<'_>) -> Commands {
        let (mode, rung) = match mode {
            Mode::Direct if rules.cost.able.direct => (mode, Rung::Append),
            // The session is there, but its engine cannot append to it.
            Mode::Direct => (Mode::Reseed, self.rung(worker, reuse_blocks, rules)),
            _ => (mode, self.rung(worker, reuse_blocks, rules)),
        };
        let attempt = self.attempt;
        let plan =
            Dispatch { mode, rung, decode: worker, prefill: None, reuse_blocks, admitted: true, attempt };
        self.fill(plan, rules)
    }

    /// The ladder (A3). The paper always goes through P; a session's first turn does too unless it is short:
    /// that is what a Seed is, and it costs nothing (TTFT p99 in the replay lab: no difference).
    fn rung(&self, worker: WorkerId, reuse_blocks: u32, rules: Rules<'_>) -> Rung {
        let held = Tokens::from(reuse_blocks) * Tokens::from(rules.options.block_tokens);
        let missing = self.ask.input_len.saturating_sub(held);
        let first = self.ask.turn == 0 && missing > rules.options.tau_append;
        match (rules.options.large_append, self.prefill.is_empty()) {
            (LargeAppend::Reject, true) => Rung::Local,
            (LargeAppend::Reject, false) => Rung::Full,
            (LargeAppend::Ladder, false) if first => Rung::Full,
            (LargeAppend::Ladder, _) => cheapest(&self.ladder(worker, held, rules.options), rules.cost).0,
        }
    }

    fn ladder(&self, worker: WorkerId, held_d: Tokens, options: &Options) -> LadderInput {
        let d = self.decode.iter().find(|c| c.id == worker);
        let p = self.prefill.iter().min_by_key(|p| (p.backlog, p.id));
        LadderInput {
            input_len: self.ask.input_len,
            held_d,
            backup: d.map_or(Backup::default(), |d| d.backup),
            prefix_len: self.ask.input_len.saturating_sub(self.ask.append_len),
            beta: options.d2p_staleness_budget_tokens.unwrap_or(0),
            held_p: p.map(|p| p.held),
            backlog_p: p.map_or(0, |p| p.backlog),
            backlog_d: d.and_then(|d| d.load).map_or(0, |l| l.queued_tokens),
            running_d: d.map_or(0, |d| d.load.map_or(d.inflight, |l| l.running.max(d.inflight))),
        }
    }

    /// Adds the P a rung needs, then dispatches.
    fn fill(&mut self, plan: Dispatch, rules: Rules<'_>) -> Commands {
        if plan.rung == Rung::Restore {
            let source = self.decode.iter().find(|c| c.id == plan.decode).and_then(|c| c.backup.source);
            return self.dispatch(Dispatch { prefill: source, ..plan }, rules);
        }
        if !plan.rung.uses_prefill() {
            return self.dispatch(plan, rules);
        }
        if self.gone_prefill.is_empty() {
            self.phase = Phase::PickingPrefill(plan);
            return smallvec![Command::PickPrefill];
        }
        // The router would choose the failed P again: the least backlog among the others.
        let prefill = self.prefill.iter().min_by_key(|p| (p.backlog, p.id)).map(|p| p.id);
        self.dispatch(Dispatch { prefill, ..plan }, rules)
    }

    /// A rung without its P is `local`, where the engine can do that.
    fn dispatch(&mut self, plan: Dispatch, rules: Rules<'_>) -> Commands {
        let alone = plan.prefill.is_none() && plan.rung.uses_prefill();
        let plan = if alone { Dispatch { rung: Rung::Local, ..plan } } else { plan };
        if plan.rung == Rung::Local && !rules.cost.able.local {
            let mut commands = self.refuse(Refused::NoPrefill);
            if plan.admitted {
                commands.insert(0, Command::Release { worker: plan.decode, attempt: plan.attempt });
            }
            return commands;
        }
        self.phase = Phase::Running(plan);
        smallvec![Command::Dispatch(plan)]
    }

    /// Line 25: nobody admitted it (D5).
    fn overflow(&mut self, rules: Rules<'_>) -> Commands {
        if self.decode.is_empty() {
            return self.refuse(if self.busy > 0 { Refused::Busy } else { Refused::NoWorkers });
        }
        if rules.options.overflow == Overflow::Fallback {
            self.phase = Phase::PickingFallback;
            return smallvec![Command::PickFallback];
        }
        // Whole blocks, as Admit counts: what could never be admitted does not wait.
        let block = Tokens::from(rules.options.block_tokens);
        let need = (self.ask.input_len + self.output_reserve).next_multiple_of(block);
        let known = |c: &Candidate| c.load.map(|l| l.k_d);
        if self.decode.iter().all(|c| known(c).is_some_and(|k_d| self.ask.input_len >= k_d)) {
            return self.refuse(Refused::TooLarge);
        }
        let admissible =
            self.decode.iter().any(|c| known(c).is_none_or(|k| need <= rules.options.high_water(k)));
        if admissible && !self.waited {
            self.phase = Phase::Waiting;
            return smallvec![Command::Wait { work: self.work(rules.options) }];
        }
        match self.roomiest() {
            // D computes it alone: a P whose blocks wait for room at D would hold up turns that have room.
            Some((worker, room)) if !admissible || room >= self.ask.input_len => {
                let rung = if rules.cost.able.local { Rung::Local } else { Rung::Full };
                let plan = self.fallback(worker, rung);
                self.fill(plan, rules)
            }
            _ => self.refuse(Refused::NoCapacity),
        }
    }

    /// Tokens the cheapest worker would still have to compute.
    fn work(&self, options: &Options) -> Tokens {
        let held = self.decode.iter().map(|c| Tokens::from(c.overlap)).max().unwrap_or(0);
        self.ask.input_len.saturating_sub(held * Tokens::from(options.block_tokens))
    }

    /// The D with most head-room beside its running turns, and that room.
    fn roomiest(&self) -> Option<(WorkerId, Tokens)> {
        let room = |c: &Candidate| c.load.map_or(0, |l| l.k_d.saturating_sub(l.active));
        self.decode
            .iter()
            .max_by_key(|c| (room(c), std::cmp::Reverse((c.inflight, c.id))))
            .map(|c| (c.id, room(c)))
    }

    /// The round robins of a Fallback are blind, but nobody is asked again who has failed this request or was busy.
    fn seeing(&self, prefill: Option<WorkerId>, decode: WorkerId) -> (Option<WorkerId>, WorkerId) {
        let prefill = match prefill {
            Some(p) if self.gone_prefill.contains(&p) => {
                self.prefill.iter().min_by_key(|p| (p.backlog, p.id)).map(|p| p.id)
            }
            other => other,
        };
        if !self.gone.contains(&decode) {
            return (prefill, decode);
        }
        let left = self.decode.iter().min_by_key(|c| (c.inflight, c.id));
        (prefill, left.map_or(decode, |c| c.id))
    }

    fn fallback(&mut self, decode: WorkerId, rung: Rung) -> Dispatch {
        self.attempt += 1;
        Dispatch {
            mode: Mode::Fallback,
            rung,
            decode,
            prefill: None,
            reuse_blocks: 0,
            admitted: false,
            attempt: self.attempt,
        }
    }

    /// D8: a failed attempt is placed again within the same request.
    fn replace(&mut self, session: &mut SessionState, plan: Dispatch, fault: Failure) -> Commands {
        let release = Command::Release { worker: plan.decode, attempt: plan.attempt };
        self.replaced += 1;
        match fault {
            Failure::DecodeUnreachable => self.lose(session, plan.decode),
            Failure::Busy if planted!(BusyRetriedBlindly) => {}
            Failure::Busy => {
                self.busy += 1;
                self.gone.push(plan.decode);
            }
            Failure::PlanMismatch if self.replaced > 1 => self.gone.push(plan.decode),
            Failure::PlanMismatch => {}
            Failure::PrefillUnreachable | Failure::PrefillBusy => self.gone_prefill.extend(plan.prefill),
        }
        if planted!(PinMovedOnFailure) {
            session.pin = Some(plan.decode);
        }
        let spent = self.replaced > MAX_REPLACED || self.busy > 1;
        let mut commands = if spent {
            self.refuse(match fault {
                Failure::Busy => Refused::Busy,
                Failure::DecodeUnreachable => Refused::NoWorkers,
                Failure::PrefillUnreachable | Failure::PrefillBusy | Failure::PlanMismatch => {
                    Refused::Unsettled
                }
            })
        } else {
            self.gather()
        };
        if plan.admitted {
            commands.insert(0, release);
        }
        commands
    }

    /// A worker that cannot be reached: not for this request again, and no pin.
    fn lose(&mut self, session: &mut SessionState, worker: WorkerId) {
        self.gone.push(worker);
        self.decode.retain(|c| c.id != worker);
        if session.pin == Some(worker) {
            session.pin = None;
        }
    }

    fn refuse(&mut self, why: Refused) -> Commands {
        self.phase = Phase::Over;
        smallvec![Command::Refuse(why)]
    }

    fn cancel(&mut self) -> Commands {
        let reserved = self.reserved();
        self.phase = Phase::Over;
        reserved.map(|(worker, attempt)| Command::Release { worker, attempt }).into_iter().collect()
    }
}

/// D2, D6, D8: what the session remembers of a complete turn.
fn finished(session: &mut SessionState, plan: &Dispatch, resident: bool, options: &Options) {
    if plan.mode == Mode::Direct {
        session.rejects.clear();
    }
    let pins = match plan.mode {
        Mode::Fallback => options.fallback_pin && resident,
        _ => options.commit == Commit::Success,
    };
    if pins {
        session.pin = Some(plan.decode);
    }
}

#[cfg(test)]
mod tests;
