//! Admit and the lease calls.

use std::sync::Arc;

use http::Response;
use serde_json::json;

use crate::core::types::Tokens;
use crate::wire::admit::{AdmitAnswer, LeaseCall, decode, decode_plain};
use crate::wire::info::KvRole;

use super::super::error::NodeError;
use super::{App, Body, json};

/// `POST /admit_direct_append`.
pub fn admit(app: &App, body: &[u8], plain: bool) -> Result<Response<Body>, NodeError> {
    app.role(KvRole::Decode)?;
    app.takes_new_turns()?;
    let (mut head, hashes) = if plain { decode_plain(body) } else { decode(body) }
        .map_err(|e| NodeError::bad_request(format!("admit request: {e}")))?;
    let block = Tokens::from(app.info.block_tokens);
    // The length is the gateway's estimate; the whole blocks are certain.
    head.input_len = head.input_len.max((Tokens::from(head.known) + hashes.len() as Tokens) * block);
    let answer = app.engine.with(|s, now| match head.request(&hashes, s.ledger.residency()) {
        None => AdmitAnswer::Resend,
        Some(request) => {
            let reply = s.admit(&request, now);
            AdmitAnswer::of(reply, &request.request_id, app.engine.epoch, now)
        }
    });
    json(&answer)
}

/// What to do with a lease.
#[derive(Debug, Clone, Copy)]
pub enum LeaseAction {
    Release,
    Renew,
}

/// `POST /kvc/leases/release` and `/renew`: `{"known": whether there is such a lease}`.
pub fn lease(app: &Arc<App>, body: &[u8], action: LeaseAction) -> Result<Response<Body>, NodeError> {
    let call: LeaseCall =
        serde_json::from_slice(body).map_err(|e| NodeError::bad_request(format!("lease call: {e}")))?;
    let known = call.is_for(app.engine.epoch)
        && app.engine.with(|s, now| match action {
            LeaseAction::Release => s.give_back(&call.request_id, now),
            LeaseAction::Renew => s.ledger.renew(&call.request_id, now),
        });
    json(&json!({"known": known}))
}
