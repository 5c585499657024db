//! Requests that arrive at the node: legs of gateways' turns, told apart by `x-kvc-plan`, and plain ones.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use actix_web::http::StatusCode;
use serde_json::{Value, json};

use super::Beside;
use crate::actors::api::{DispatchPlan, Failure, Refusal, TurnResult, WorkerRef};
use crate::actors::gate::{Gate, Permit};
use crate::core::ledger::AdmitRequest;
use crate::core::types::{Mode, Rung, SessionId, Tokens};
use crate::engines::builtin::PLAN_MISMATCH;
use crate::http::backend::{Backend, Incoming, Turn};
use crate::http::errors::ApiError;
use crate::http::observe::Observed;
use crate::keeper::books::Served;
use crate::keeper::hold::Hold;
use crate::prompt::{self, Api, BYTES_PER_TOKEN};
use crate::wire::info::KvRole;
use crate::wire::plan::{PLAN_HEADER, Plan};

/// A request at the engine, with its hold on the books.
pub struct Leg {
    plan: DispatchPlan,
    hold: RefCell<Option<Hold>>,
    _permit: Permit,
}

impl Backend for Beside {
    type Turn = Leg;

    fn gate(&self) -> &Arc<Gate> {
        &self.0.gate
    }

    async fn place(&self, incoming: Incoming<'_>, permit: Permit) -> Result<Leg, ApiError> {
        if let Err(why) = self.info() {
            return Err(unavailable(format!("the engine cannot be used: {why}")));
        }
        let plan = match incoming.headers.get(PLAN_HEADER) {
            None => None,
            Some(value) => Some(
                serde_json::from_slice::<Plan>(value.as_bytes())
                    .map_err(|e| ApiError::bad_body(format!("{PLAN_HEADER}: {e}"), None))?,
            ),
        };
        match plan {
            Some(Plan::Decode { request_id, session, mode, lease_epoch: Some(epoch), .. }) => {
                self.role(KvRole::Decode)?;
                let hold = self.0.keeper.begin(&request_id, epoch, session.is_some());
                let hold = hold.map_err(|why| {
                    let message = format!("no lease for {request_id}: {why:?}");
                    ApiError::new(StatusCode::CONFLICT, PLAN_MISMATCH, message)
                })?;
                Ok(self.leg(request_id, session, mode, (hold, permit)))
            }
            Some(Plan::Decode { request_id, session, mode, .. }) => {
                self.role(KvRole::Decode)?;
                self.forced(&incoming, request_id, (session, mode), permit)
            }
            Some(Plan::Prefill { request_id, session, .. }) => {
                self.role(KvRole::Prefill)?;
                self.forced(&incoming, request_id, (Some(session), Mode::Reseed), permit)
            }
            Some(Plan::Restore { .. }) => {
                let message = "this engine sends no backups";
                Err(ApiError::new(StatusCode::CONFLICT, PLAN_MISMATCH, message))
            }
            None => {
                let number = self.0.requests.fetch_add(1, Ordering::Relaxed);
                self.forced(&incoming, format!("plain-{number}"), (None, Mode::Fallback), permit)
            }
        }
    }

    fn count(&self, incoming: Incoming<'_>) -> Result<u64, ApiError> {
        let prompt = prompt::read(Api::Messages, incoming.body, &())?;
        Ok(prompt.layout().bytes() / BYTES_PER_TOKEN as u64)
    }

    fn anyone(&self, nth: usize) -> Option<WorkerRef> {
        (nth == 0 && self.info().is_ok()).then(|| self.0.at.clone())
    }

    fn ready(&self) -> bool {
        !self.draining() && self.info().is_ok()
    }

    fn models(&self) -> Vec<String> {
        self.info().map(|info| vec![info.model]).unwrap_or_default()
    }

    async fn sessions(&self) -> Value {
        json!({"sessions": []})
    }

    async fn workers(&self) -> Value {
        let load = self.0.keeper.with(|books, _| books.load());
        json!({"engine": self.0.keeper.observe(), "load": load, "why": self.info().err()})
    }
}

impl Beside {
    pub(super) fn role(&self, role: KvRole) -> Result<(), ApiError> {
        if self.0.roles.contains(&role) {
            return Ok(());
        }
        let message = format!("this node does not have the role {role:?}");
        Err(ApiError::new(StatusCode::FORBIDDEN, "kvc_role", message))
    }

    /// A turn without a lease. Its chain is read from its body.
    fn forced(
        &self,
        incoming: &Incoming<'_>,
        request_id: String,
        (session, mode): (Option<SessionId>, Mode),
        permit: Permit,
    ) -> Result<Leg, ApiError> {
        if self.draining() {
            return Err(unavailable("the node is draining".into()));
        }
        let api = Api::from_path(incoming.path).unwrap_or(Api::Chat);
        let read = prompt::read(api, incoming.body, &());
        let read = read.map_err(|bad| ApiError::bad_body(bad.message, bad.param))?;
        let layout = read.layout();
        let request = AdmitRequest {
            request_id: request_id.clone(),
            session: session.clone().unwrap_or_else(|| SessionId::new(format!("plain/{request_id}"))),
            turn: 0,
            chain: layout.chain.clone(),
            input_len: layout.bytes() / BYTES_PER_TOKEN as Tokens,
            output_reserve: 0,
        };
        let hold = self.0.keeper.force(request, session.is_some()).map_err(|why| {
            let message = format!("turn {request_id} cannot begin: {why:?}");
            ApiError::new(StatusCode::CONFLICT, PLAN_MISMATCH, message)
        })?;
        Ok(self.leg(request_id, session, mode, (hold, permit)))
    }

    fn leg(
        &self,
        request_id: String,
        session: Option<SessionId>,
        mode: Mode,
        (hold, permit): (Hold, Permit),
    ) -> Leg {
        let plan = DispatchPlan {
            one_shot: session.is_none(),
            session: session.unwrap_or_else(|| SessionId::new("plain")),
            request_id,
            mode,
            rung: Rung::Local,
            decode: self.0.at.clone(),
            prefill: None,
            reuse_blocks: 0,
            lease: None,
            restore_blocks: 0,
            sync: Vec::new(),
            slot: hold.slot(),
            replaced: 0,
        };
        Leg { plan, hold: RefCell::new(Some(hold)), _permit: permit }
    }
}

fn unavailable(message: String) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "engine_unavailable", message)
}

impl Turn for Leg {
    fn plan(&self) -> &DispatchPlan {
        &self.plan
    }

    fn complete(&self, seen: &Observed) {
        if let Some(mut hold) = self.hold.take() {
            hold.commit(&Served::from(&TurnResult::from(seen)));
        }
    }

    /// There is one engine. The gateway has others.
    async fn failed(self, failure: Failure) -> Result<Self, Refusal> {
        let message = format!("the engine failed before it answered ({failure:?})");
        Err(Refusal { status: 503, code: "engine_unavailable", message, retry_after: Some(1) })
    }

    fn finished(self, observed: Observed) {
        self.complete(&observed);
    }
}
