//! A granted turn in the hands of whoever executes it. However it ends (finished, failed, dropped with its
//! client), the session actor hears of it exactly once.

use std::sync::{Arc, Weak};

use ractor::ActorRef;

use super::api::{DispatchPlan, Failure, Refusal, TurnResult, refusal};
use super::gate::Permit;
use super::reply::Reply;
use super::session::{Placed, SessionMsg, TurnKey};
use super::shared::Shared;
use super::worker::Outcome;
use crate::core::breaker::Fault;
use crate::core::turn::Refused;
use crate::explain::record::Record;
use crate::wire::plan::Report;

/// See the module. Dropping it cancels the turn.
#[derive(Debug)]
pub struct Grant {
    /// What to do.
    pub plan: DispatchPlan,
    /// The decision's record, when it was asked for.
    pub record: Option<Box<Record>>,
    actor: ActorRef<SessionMsg>,
    turn: TurnKey,
    shared: Arc<Shared>,
    /// Tells the actor that this is still there.
    alive: Arc<()>,
    over: bool,
    permit: Option<Permit>,
}

impl Grant {
    pub(super) fn new(
        plan: DispatchPlan,
        record: Option<Box<Record>>,
        (actor, turn): (ActorRef<SessionMsg>, TurnKey),
        shared: &Arc<Shared>,
    ) -> Self {
        let (shared, alive) = (shared.clone(), Arc::default());
        Self { plan, record, actor, turn, shared, alive, over: false, permit: None }
    }

    /// Upgrades while the turn is in somebody's hands.
    pub(super) fn alive(&self) -> Weak<()> {
        Arc::downgrade(&self.alive)
    }

    /// The last word to the actor; without one the lease goes back from here.
    fn end(&mut self, message: SessionMsg) {
        self.over = true;
        if self.actor.cast(message).is_err() {
            self.give_back();
        }
    }

    fn give_back(&self) {
        if self.plan.lease.is_some() {
            self.shared.release(self.plan.decode.id, self.plan.request_id.clone());
        }
    }

    pub(super) fn admit(mut self, permit: Option<Permit>) -> Self {
        self.permit = permit;
        self
    }

    /// The P has done its part; its backlog falls before the turn ends.
    pub fn prefill_done(&self) {
        let _ = self.actor.cast(SessionMsg::PrefillDone(self.turn));
    }

    /// The D says what it did for the turn.
    pub fn reported(&self, report: Report) {
        let _ = self.actor.cast(SessionMsg::Reported(self.turn, report));
    }

    /// The turn is complete.
    pub fn finished(mut self, result: TurnResult) {
        self.end(SessionMsg::Finished(self.turn, result));
    }

    /// The turn broke off in the middle of its answer (`Fault::Broken`), or its D answered 5xx.
    pub fn broken(mut self, fault: Fault) {
        self.end(SessionMsg::Broken(self.turn, Outcome::Failed(fault)));
    }

    /// The turn failed before any byte reached the client: places it again.
    ///
    /// # Errors
    /// It was placed too often, or nowhere is left to place it.
    pub async fn failed(mut self, failure: Failure) -> Placed {
        self.over = true;
        let (reply, placed) = Reply::channel();
        let message = SessionMsg::Failed { turn: self.turn, fault: failure, reply };
        let _ = self.actor.cast(message);
        let permit = self.permit.take();
        let guard = Pending::new(self.actor.clone(), self.turn);
        let placed = placed.await;
        guard.answered();
        let Some(placed) = placed else {
            self.give_back();
            return Err(lost());
        };
        placed.map(|grant| grant.admit(permit))
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if !self.over && !planted!(CancelLost) {
            self.end(SessionMsg::Cancelled(self.turn));
        }
    }
}

/// A turn that is being placed: a client that leaves meanwhile must still be heard.
pub(super) struct Pending(Option<(ActorRef<SessionMsg>, TurnKey)>);

impl Pending {
    pub(super) fn new(actor: ActorRef<SessionMsg>, turn: TurnKey) -> Self {
        Self(Some((actor, turn)))
    }

    pub(super) fn answered(mut self) {
        self.0 = None;
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some((actor, turn)) = self.0.take() {
            let _ = actor.cast(SessionMsg::Cancelled(turn));
        }
    }
}

/// The session's actor died with the turn.
pub(super) fn lost() -> Refusal {
    Refusal {
        code: "turn_lost",
        message: "the turn was lost, send it again".into(),
        ..refusal(Refused::NoWorkers)
    }
}
