//! The session actor: pin, rejects and the running turns of one session. Decisions are serial because they are
//! this actor's messages; it drives the turn machine and turns its commands into messages to others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::time::Instant;

use super::api::{DispatchPlan, TurnRequest, TurnResult};
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
use super::worker::{Outcome, WorkerMsg};
use crate::core::breaker::Fault;
use crate::core::options::Placement;
use crate::core::route::{Ask, SessionState};
use crate::core::turn::{Command, Commands, Dispatch, Event, Failure, Turn};
use crate::core::types::{Mode, Rung, SessionId, Tokens, WorkerId};
use crate::wire::admit::Lease;

mod commands;
mod messages;

pub use messages::{Placed, SessionArgs, SessionMsg, SessionView, TurnEvent, TurnKey};

/// Times a question is put again because the actor asked died with it.
const MAX_LOST: u32 = 3;
/// Answer size expected of a session that has not answered yet, in tokens.
const FIRST_OUTPUT: Tokens = 512;

struct Running {
    request: TurnRequest,
    machine: Turn,
    reply: Option<Reply<Placed>>,
    lease: Option<Lease>,
    /// Whether whoever executes it is still there.
    granted: Weak<()>,
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
    output: Tokens,
    input_len: Tokens,
    completed: u64,
    moves: u64,
    last_used: Instant,
    idle_armed: bool,
}

impl Drop for SessionActorState {
    fn drop(&mut self) {
        // An actor that panicked never rests: without this the book would keep its address for ever.
        self.shared.book.forget(&self.id, self.myself.get_id());
        // Turns that are executed go on without it; the grant gives their leases back.
        for (turn, running) in self.turns.iter().filter(|(_, running)| running.granted.strong_count() == 0) {
            if let Some((worker, attempt)) = running.machine.reserved() {
                self.release(*turn, worker, attempt);
            }
        }
    }
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
        fault_site!(crate::fault_lab::Site::Session {
            instance: state.shared.config.instance,
            session: &state.id,
            actor: myself.get_id().pid(),
            begins: matches!(message, SessionMsg::Begin { .. }) && !state.one_shot,
        });
        if state.handle(message) {
            myself.stop(None);
        }
        fault_site!(crate::fault_lab::Site::Done("session"));
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
            SessionMsg::Broken(turn, how) => {
                self.verdict(turn, how);
                self.step(turn, Event::Cancelled);
                self.end(turn);
            }
            SessionMsg::Cancelled(turn) => {
                self.verdict(turn, Outcome::Ended);
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
        if self.turns.len() >= self.shared.config.max_session_turns {
            reply.send(Err(super::api::session_busy()));
            return;
        }
        self.input_len = request.input_len;
        let ask = Ask { turn: request.turn, input_len: request.input_len, append_len: request.append_len };
        let reserve = request.max_output.unwrap_or(Tokens::MAX).min(self.output);
        let recording = request.explain.then(|| Recording::new(&self.shared));
        let running = Running {
            machine: Turn::new(ask, reserve),
            request,
            reply: Some(reply),
            lease: None,
            granted: Weak::new(),
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
            // Of several, the one that its client says it was at.
            let hint = self.turns.get(&turn).and_then(|running| running.request.hint.clone());
            let hinted = |id| {
                let slot = self.shared.worker(id).filter(|_| hint.is_some());
                slot.is_some_and(|slot| Some(&slot.at.name) == hint.as_ref())
            };
            let holders = fleet.decode.iter().filter(|c| c.resident > 0);
            let holder = holders.max_by_key(|c| (hinted(c.id), c.overlap, c.resident));
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
            let outcome = match fault {
                Failure::DecodeUnreachable | Failure::PrefillUnreachable => Outcome::Failed(Fault::Broken),
                Failure::Busy | Failure::PrefillBusy | Failure::PlanMismatch => Outcome::Ended,
            };
            let prefill = matches!(fault, Failure::PrefillUnreachable | Failure::PrefillBusy);
            let plan = running.machine.running().copied();
            let (d, p) = (plan.map(|plan| plan.decode), plan.and_then(|plan| plan.prefill));
            for (worker, to_blame) in [(d, !prefill), (p, prefill)] {
                if let Some(slot) = worker.and_then(|worker| self.shared.worker(worker)) {
                    slot.cast(WorkerMsg::Outcome(if to_blame { outcome } else { Outcome::Ended }));
                }
            }
            running.no_restore |= running.machine.running().is_some_and(|plan| plan.rung == Rung::Restore);
            running.reply = Some(reply);
            running.granted = Weak::new();
            running.inflight = None;
            running.backlog = None;
            self.step(turn, Event::Failed(fault));
        }
    }

    fn finished(&mut self, turn: TurnKey, result: &TurnResult) {
        let Some(running) = self.turns.get(&turn) else { return };
        let resident = !running.request.one_shot && self.shared.config.options.fallback_pin;
        let before = self.state.pin;
        self.verdict(turn, Outcome::Served);
        self.step(turn, Event::Finished { resident });
        self.moves += u64::from(before.is_some() && before != self.state.pin);
        self.completed += 1 + u64::from(planted!(DoubleCommit));
        if let Some(tokens) = result.completion_tokens {
            // Rises at once, falls slowly: a reservation too small is worse than one too large.
            self.output = tokens.max(self.output - self.output / 8).max(1);
        }
        if let Some(tokens) = result.prompt_tokens {
            self.input_len = tokens + result.completion_tokens.unwrap_or(0);
        }
        self.end(turn);
    }

    /// Tells the workers of a running turn how it ended. A P that let D begin has done its part.
    fn verdict(&self, turn: TurnKey, outcome: Outcome) {
        let Some(plan) = self.turns.get(&turn).and_then(|running| running.machine.running()) else { return };
        if let Some(slot) = self.shared.worker(plan.decode) {
            slot.cast(WorkerMsg::Outcome(outcome));
        }
        if let Some(slot) = plan.prefill.and_then(|p| self.shared.worker(p)) {
            let ended = if outcome == Outcome::Ended { outcome } else { Outcome::Served };
            slot.cast(WorkerMsg::Outcome(ended));
        }
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

    fn give_up(&mut self, turn: TurnKey) {
        self.step(turn, Event::Cancelled);
        if let Some(reply) = self.turns.get_mut(&turn).and_then(|r| r.reply.take()) {
            reply.send(Err(super::api::refusal(crate::core::turn::Refused::NoWorkers)));
        }
        self.end(turn);
    }

    fn end(&mut self, turn: TurnKey) {
        self.leave_queue(turn);
        let ended = self.turns.remove(&turn);
        if planted!(InflightKept) {
            std::mem::forget(ended.and_then(|running| running.inflight));
        }
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
