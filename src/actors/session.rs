//! The session actor: pin, rejects and the running turns of one session. Decisions are serial because they are
//! this actor's messages; it drives the turn machine and turns its commands into messages to others.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::time::Instant;

use super::api::{DispatchPlan, Refusal, TurnRequest, TurnResult};
use super::backup::{Holding, targets};
use super::book::{Live, Record};
use super::gather::Fleet;
use super::grant::Grant;
use super::recording::Recording;
use super::reply::Reply;
use super::router::{RouterMsg, Waiting};
use super::rpc::{Admission, AdmitAsk};
use super::shared::Shared;
use super::slot::CountGuard;
use super::sync_meter::OverBudget;
use super::worker::WorkerMsg;
use crate::core::options::Placement;
use crate::core::route::{Ask, SessionState};
use crate::core::turn::{Command, Commands, Dispatch, Event, Failure, Turn};
use crate::core::types::{Mode, Rung, SessionId, Tokens, WorkerId};
use crate::wire::admit::Lease;
use crate::wire::plan::Report;

/// Times a question is put again because the actor asked died with it.
const MAX_LOST: u32 = 3;
/// Answer size expected of a session that has not answered yet, in tokens.
const FIRST_OUTPUT: Tokens = 512;

/// Names a turn within one router.
pub type TurnKey = u64;

/// The answer to a turn: how to execute it, or why not.
pub type Placed = Result<Grant, Refusal>;

/// Messages of a session actor.
pub enum SessionMsg {
    /// A turn arrived.
    Begin {
        /// Names the turn from now on; unique over the router.
        turn: TurnKey,
        /// The turn.
        request: Box<TurnRequest>,
        /// Where it goes.
        reply: Reply<Placed>,
    },
    /// Something a turn asked for came back.
    Event {
        /// The turn.
        turn: TurnKey,
        /// What came back.
        event: TurnEvent,
    },
    /// A granted turn failed before any byte reached the client: place it again.
    Failed {
        /// The turn.
        turn: TurnKey,
        /// Why.
        fault: Failure,
        /// The new placement.
        reply: Reply<Placed>,
    },
    /// A granted turn's P has done its part.
    PrefillDone(TurnKey),
    /// What a granted turn's D did for it.
    Reported(TurnKey, Report),
    /// A granted turn is complete.
    Finished(TurnKey, TurnResult),
    /// A turn's client is gone, or the turn failed beyond repair.
    Cancelled(TurnKey),
    /// Look whether this session rests.
    Idle,
    /// Observable state.
    Observe(Reply<SessionView>),
    /// Panics in its handler.
    #[cfg(test)]
    Panic,
}

/// An answer to a turn's question. `None`: the actor asked is gone.
pub enum TurnEvent {
    /// To `Gather`.
    Fleet(Option<Fleet>),
    /// To `Admit`.
    Admission(Option<Admission>),
    /// To `PickPrefill`.
    Prefill(Option<Option<WorkerId>>),
    /// To `PickFallback`.
    Fallback(Option<Option<(Option<WorkerId>, WorkerId)>>),
    /// From the wait queue.
    RoomFreed,
    /// From the wait queue.
    WaitOver,
}

/// What a session actor shows of itself.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SessionView {
    /// `s(r)`, without its scope.
    pub session: String,
    /// `pin[s]`.
    pub pin: Option<String>,
    /// `rejects[s, ·]`.
    pub rejects: HashMap<String, u32>,
    /// Turns being placed or executed.
    pub running: usize,
    /// Turns completed.
    pub turns: u64,
    /// Times its pin went to another D.
    pub moves: u64,
    /// Length of the last prompt, in tokens.
    pub input_len: Tokens,
    /// Seconds since the last turn began or ended.
    pub idle_s: u64,
}

/// What a session actor needs.
pub struct SessionArgs {
    /// `s(r)`.
    pub id: SessionId,
    /// What all actors share.
    pub shared: Arc<Shared>,
    /// What was kept of it, if it rested.
    pub record: Option<Record>,
    /// Turns in the mailbox.
    pub waiting: Arc<AtomicU32>,
    /// The actor of one side request: it stops with its turn and is in no book.
    pub one_shot: bool,
}

struct Running {
    request: TurnRequest,
    machine: Turn,
    reply: Option<Reply<Placed>>,
    lease: Option<Lease>,
    /// Asked and not answered; put again when the actor asked is gone.
    asked: Option<Command>,
    lost: u32,
    queued: bool,
    inflight: Option<CountGuard>,
    backlog: Option<CountGuard>,
    /// What the P workers held when the turn was last scored.
    holdings: Vec<Holding>,
    /// A restore failed: the turn takes the next rung.
    no_restore: bool,
    recording: Option<Recording>,
}

/// State of a session actor.
pub struct SessionActorState {
    id: SessionId,
    shared: Arc<Shared>,
    waiting: Arc<AtomicU32>,
    one_shot: bool,
    myself: ActorRef<SessionMsg>,
    state: SessionState,
    /// Nothing is known of it here: another gateway, or an earlier life of this one, may have pinned it.
    unknown: bool,
    pinned: Option<CountGuard>,
    turns: HashMap<TurnKey, Running>,
    /// The P it last had to do with.
    last_p: Option<WorkerId>,
    /// Its last turn told a D where to push.
    pushes: bool,
    over_budget: Option<OverBudget>,
    output: Tokens,
    input_len: Tokens,
    completed: u64,
    moves: u64,
    last_used: Instant,
    idle_armed: bool,
}

/// See the module.
pub struct SessionActor;

impl Actor for SessionActor {
    type Msg = SessionMsg;
    type State = SessionActorState;
    type Arguments = SessionArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<SessionMsg>,
        args: SessionArgs,
    ) -> Result<SessionActorState, ActorProcessingErr> {
        let record = args.record;
        let last_p = record.as_ref().and_then(|r| r.last_p);
        Ok(SessionActorState {
            id: args.id,
            shared: args.shared,
            waiting: args.waiting,
            one_shot: args.one_shot,
            myself,
            unknown: record.is_none(),
            output: record.as_ref().map_or(FIRST_OUTPUT, |r| r.output),
            state: record.map(|r| r.state).unwrap_or_default(),
            pinned: None,
            turns: HashMap::new(),
            last_p,
            pushes: last_p.is_some(),
            over_budget: None,
            input_len: 0,
            completed: 0,
            moves: 0,
            last_used: Instant::now(),
            idle_armed: false,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<SessionMsg>,
        message: SessionMsg,
        state: &mut SessionActorState,
    ) -> Result<(), ActorProcessingErr> {
        if state.handle(message) {
            myself.stop(None);
        }
        Ok(())
    }
}

impl SessionActorState {
    /// Returns whether the actor should stop.
    fn handle(&mut self, message: SessionMsg) -> bool {
        match message {
            SessionMsg::Begin { turn, request, reply } => self.begin(turn, *request, reply),
            SessionMsg::Event { turn, event } => self.event(turn, event),
            SessionMsg::Failed { turn, fault, reply } => self.failed(turn, fault, reply),
            SessionMsg::PrefillDone(turn) => {
                if let Some(running) = self.turns.get_mut(&turn) {
                    running.backlog = None;
                }
            }
            SessionMsg::Reported(turn, report) => self.reported(turn, &report),
            SessionMsg::Finished(turn, result) => self.finished(turn, &result),
            SessionMsg::Cancelled(turn) => {
                self.step(turn, Event::Cancelled);
                self.end(turn);
            }
            SessionMsg::Idle => return self.idle(),
            SessionMsg::Observe(reply) => reply.send(self.view()),
            #[cfg(test)]
            SessionMsg::Panic => panic!("asked to"),
        }
        self.one_shot && self.turns.is_empty()
    }

    fn begin(&mut self, turn: TurnKey, request: TurnRequest, reply: Reply<Placed>) {
        self.waiting.fetch_sub(1, Relaxed);
        self.last_used = Instant::now();
        self.input_len = request.input_len;
        let ask = Ask { turn: request.turn, input_len: request.input_len, append_len: request.append_len };
        let reserve = request.max_output.unwrap_or(Tokens::MAX).min(self.output);
        let recording = request.explain.then(|| Recording::new(&self.shared));
        let running = Running {
            machine: Turn::new(ask, reserve),
            request,
            reply: Some(reply),
            lease: None,
            asked: None,
            lost: 0,
            queued: false,
            inflight: None,
            backlog: None,
            holdings: Vec::new(),
            no_restore: false,
            recording,
        };
        self.turns.insert(turn, running);
        self.step(turn, Event::Begin);
    }

    fn event(&mut self, turn: TurnKey, event: TurnEvent) {
        let Some(running) = self.turns.get_mut(&turn) else {
            // The turn is over; what was granted to it meanwhile goes back.
            if let TurnEvent::Admission(Some(Admission { lease: Some(lease), .. })) = event {
                self.release_everywhere(&lease.request_id);
            }
            return;
        };
        // News from the wait queue answers nothing but `Wait`: a late one must not pass for another answer.
        let waits = matches!(running.asked, None | Some(Command::Wait { .. }));
        if matches!(event, TurnEvent::RoomFreed | TurnEvent::WaitOver) && !waits {
            return;
        }
        let answered = running.asked.take();
        match event {
            TurnEvent::Fleet(Some(fleet)) => self.fleet(turn, fleet),
            TurnEvent::Admission(admission) => {
                // A worker actor that died with the question in its mailbox is a worker that was silent.
                let admission = admission.unwrap_or(Admission::from(crate::core::turn::Answer::Silent));
                running.lease = admission.lease;
                self.step(turn, Event::Answer(admission.answer));
            }
            TurnEvent::Prefill(Some(p)) => self.step(turn, Event::Prefill(p)),
            TurnEvent::Fallback(Some(Some((prefill, decode)))) => {
                self.step(turn, Event::FallbackPair { prefill, decode });
            }
            TurnEvent::RoomFreed => self.step(turn, Event::RoomFreed),
            TurnEvent::WaitOver => {
                running.queued = false;
                self.step(turn, Event::WaitOver);
            }
            TurnEvent::Fleet(None) | TurnEvent::Prefill(None) | TurnEvent::Fallback(_) => {
                running.lost += 1;
                match answered {
                    Some(command) if running.lost <= MAX_LOST => self.ask(turn, command),
                    _ => self.give_up(turn),
                }
            }
        }
    }

    fn fleet(&mut self, turn: TurnKey, mut fleet: Fleet) {
        self.freshen(&mut fleet);
        let options = &self.shared.config.options;
        if self.unknown && options.placement == Placement::Cost {
            // Pins are recoverable: the mirrors know who holds this session.
            let holder =
                fleet.decode.iter().filter(|c| c.resident > 0).max_by_key(|c| (c.overlap, c.resident));
            self.state.pin = holder.map(|c| c.id);
        }
        self.unknown = false;
        self.look_at_backups(turn, &mut fleet);
        if let Some(running) = self.turns.get_mut(&turn)
            && let Some(recording) = &mut running.recording
        {
            recording.round(&self.state, &fleet, &running.machine);
        }
        self.step(turn, Event::Fleet { decode: &fleet.decode, prefill: &fleet.prefill });
    }

    /// Turns that arrive together are scored before any of them is placed. Their counts are read again here, so
    /// that they see each other and don't all choose the same worker.
    fn freshen(&self, fleet: &mut Fleet) {
        for c in &mut fleet.decode {
            let Some(slot) = self.shared.worker(c.id) else { continue };
            c.inflight = slot.inflight();
            c.assigned = slot.assigned();
            let own = self.pinned.as_ref().map_or(0, |pinned| pinned.pinned_at(c.id));
            c.pinned_tokens = slot.pinned_tokens().saturating_sub(own);
        }
        for p in &mut fleet.prefill {
            p.backlog = self.shared.worker(p.id).map_or(p.backlog, |slot| slot.backlog());
        }
    }

    fn failed(&mut self, turn: TurnKey, fault: Failure, reply: Reply<Placed>) {
        if let Some(running) = self.turns.get_mut(&turn) {
            running.no_restore |= running.machine.running().is_some_and(|plan| plan.rung == Rung::Restore);
            running.reply = Some(reply);
            running.inflight = None;
            running.backlog = None;
            self.step(turn, Event::Failed(fault));
        }
    }

    fn finished(&mut self, turn: TurnKey, result: &TurnResult) {
        let Some(running) = self.turns.get(&turn) else { return };
        let resident = !running.request.one_shot && self.shared.config.options.fallback_pin;
        let before = self.state.pin;
        self.step(turn, Event::Finished { resident });
        self.moves += u64::from(before.is_some() && before != self.state.pin);
        self.completed += 1;
        if let Some(tokens) = result.completion_tokens {
            // Rises at once, falls slowly: a reservation too small is worse than one too large.
            self.output = tokens.max(self.output - self.output / 8).max(1);
        }
        if let Some(tokens) = result.prompt_tokens {
            self.input_len = tokens + result.completion_tokens.unwrap_or(0);
        }
        self.end(turn);
    }

    /// Feeds the machine and carries out what it says.
    fn step(&mut self, turn: TurnKey, event: Event<'_>) {
        let Some(running) = self.turns.get_mut(&turn) else { return };
        let commands: Commands = running.machine.step(&mut self.state, event, self.shared.rules());
        for command in commands {
            match command {
                Command::Release { worker, attempt } => self.release(turn, worker, attempt),
                Command::Dispatch(plan) => self.dispatch(turn, plan),
                Command::Refuse(why) => {
                    let refusal = super::api::refusal(why);
                    if let Some(running) = self.turns.get_mut(&turn)
                        && let Some(reply) = running.reply.take()
                    {
                        reply.send(Err(refusal));
                    }
                    self.end(turn);
                }
                question => self.ask(turn, question),
            }
        }
    }

    /// Sends a question whose answer comes back as a [`TurnEvent`].
    fn ask(&mut self, turn: TurnKey, command: Command) {
        let Some(running) = self.turns.get_mut(&turn) else { return };
        running.asked = Some(command);
        let request = &running.request;
        match command {
            Command::Gather => {
                let (session, chain) = (request.session.clone(), request.chain.clone());
                let reply = self.reply(turn, TurnEvent::Fleet);
                self.shared.router(RouterMsg::Gather { session, chain, reply });
            }
            Command::PickPrefill => {
                let reply = self.reply(turn, TurnEvent::Prefill);
                self.shared.router(RouterMsg::PickPrefill(reply));
            }
            Command::PickFallback => {
                let reply = self.reply(turn, TurnEvent::Fallback);
                self.shared.router(RouterMsg::PickFallback(reply));
            }
            Command::Wait { work } => {
                running.queued = true;
                let session = self.myself.clone();
                self.shared.router(RouterMsg::Wait(Waiting { turn, session, work }));
            }
            Command::Admit { worker, attempt } => {
                let ask = AdmitAsk {
                    request_id: request_id(&self.shared, turn, attempt),
                    session: request.session.clone(),
                    turn: request.turn,
                    chain: request.chain.clone(),
                    input_len: request.input_len,
                    append_len: request.append_len,
                    output_reserve: running.machine.output_reserve(),
                };
                let reply = self.reply(turn, TurnEvent::Admission);
                if let Some(slot) = self.shared.worker(worker) {
                    // The session's demand counts from here on: others are being placed meanwhile.
                    self.pinned = (!self.one_shot).then(|| slot.pinned(ask.input_len));
                    slot.cast(WorkerMsg::Admit(ask, reply));
                }
            }
            Command::Release { .. } | Command::Dispatch(_) | Command::Refuse(_) => {}
        }
    }

    fn reply<T: Send + 'static>(
        &self,
        turn: TurnKey,
        event: impl FnOnce(Option<T>) -> TurnEvent + Send + 'static,
    ) -> Reply<T> {
        let myself = self.myself.clone();
        Reply::new(move |answer| {
            let _ = myself.cast(SessionMsg::Event { turn, event: event(answer) });
        })
    }

    /// Lines 10-19: counts the turn at its workers and hands it to whoever executes it.
    fn dispatch(&mut self, turn: TurnKey, plan: Dispatch) {
        self.leave_queue(turn);
        let Some(running) = self.turns.get_mut(&turn) else { return };
        let Some(decode) = self.shared.worker(plan.decode) else { return };
        let (plan, restore_blocks) = running.restorable(plan);
        let prefill = plan.prefill.and_then(|p| self.shared.worker(p));
        let record = running
            .recording
            .as_ref()
            .map(|r| r.finish(turn, &running.request, &running.machine, &plan, &self.state));
        running.inflight = Some(decode.dispatched());
        let queued = if plan.rung.uses_prefill() { running.request.input_len } else { 0 };
        running.backlog = prefill.as_ref().map(|p| p.prefilling(queued));
        if plan.mode == Mode::Reseed {
            self.shared.sync.reseed(plan.rung);
        }
        let targets = match running.request.one_shot {
            true => Vec::new(),
            false => targets(&self.shared, &running.holdings, self.last_p),
        };
        self.last_p = plan.prefill.or(targets.first().map(|(p, _)| *p)).or(self.last_p);
        self.pushes = !targets.is_empty();
        let fallback_leaves = plan.mode == Mode::Fallback && !self.shared.config.options.fallback_pin;
        let plan = DispatchPlan {
            request_id: request_id(&self.shared, turn, plan.attempt),
            session: running.request.session.clone(),
            one_shot: running.request.one_shot || fallback_leaves,
            mode: plan.mode,
            rung: plan.rung,
            decode: decode.reachable_at(),
            prefill: prefill.map(|p| p.reachable_at()),
            reuse_blocks: plan.reuse_blocks,
            lease: running.lease.take().filter(|_| plan.admitted),
            restore_blocks,
            sync: targets.into_iter().map(|(_, target)| target).collect(),
            replaced: running.machine.replaced(),
        };
        if let Some(reply) = running.reply.take() {
            reply.send(Ok(Grant::new(plan, record, self.myself.clone(), turn)));
        }
    }

    fn release(&self, turn: TurnKey, worker: WorkerId, attempt: u32) {
        let Some(slot) = self.shared.worker(worker) else { return };
        slot.cast(WorkerMsg::Release { request_id: request_id(&self.shared, turn, attempt) });
    }

    fn release_everywhere(&self, request_id: &str) {
        for slot in self.shared.workers().iter().filter(|w| w.is_up()) {
            slot.cast(WorkerMsg::Release { request_id: request_id.to_owned() });
        }
    }

    fn leave_queue(&mut self, turn: TurnKey) {
        let Some(running) = self.turns.get_mut(&turn) else { return };
        if std::mem::take(&mut running.queued) {
            self.shared.router(RouterMsg::Leave(turn));
        }
    }

    fn give_up(&mut self, turn: TurnKey) {
        self.step(turn, Event::Cancelled);
        if let Some(reply) = self.turns.get_mut(&turn).and_then(|r| r.reply.take()) {
            reply.send(Err(super::api::refusal(crate::core::turn::Refused::NoWorkers)));
        }
        self.end(turn);
    }

    fn end(&mut self, turn: TurnKey) {
        self.leave_queue(turn);
        self.turns.remove(&turn);
        let pin = self.state.pin.filter(|_| !self.one_shot).and_then(|d| self.shared.worker(d));
        self.pinned = pin.map(|slot| slot.pinned(self.input_len));
        self.last_used = Instant::now();
        self.arm();
    }

    fn arm(&mut self) {
        if self.turns.is_empty() && !self.idle_armed && !self.one_shot {
            self.idle_armed = true;
            self.myself.send_after(self.shared.config.passivate, || SessionMsg::Idle);
        }
    }

    /// Rests when nothing happened for long enough; otherwise looks again later.
    fn idle(&mut self) -> bool {
        self.idle_armed = false;
        let rest = self.shared.config.passivate;
        if self.turns.is_empty() && self.last_used.elapsed() >= rest {
            let record = Record {
                state: self.state.clone(),
                output: self.output,
                last_p: self.last_p,
                last_used: self.last_used,
            };
            let live = Live { actor: self.myself.clone(), waiting: self.waiting.clone() };
            if self.shared.book.rest(&self.id, &live, record) {
                return true;
            }
        }
        self.arm();
        false
    }

    fn view(&self) -> SessionView {
        let name =
            |d: WorkerId| self.shared.worker(d).map_or_else(|| d.to_string(), |w| w.at.name.to_string());
        SessionView {
            session: self.id.public().to_owned(),
            pin: self.state.pin.map(name),
            rejects: self.state.rejects.iter().map(|(d, n)| (name(*d), *n)).collect(),
            running: self.turns.len(),
            turns: self.completed,
            moves: self.moves,
            input_len: self.input_len,
            idle_s: self.last_used.elapsed().as_secs(),
        }
    }
}

#[path = "session_sync.rs"]
mod sync;

fn request_id(shared: &Shared, turn: TurnKey, attempt: u32) -> String {
    format!("{:x}-{turn:x}-{attempt}", shared.config.instance)
}
