//! Admit and the lease calls.

use std::sync::Arc;

use http::Response;
use serde::Deserialize;
use serde_json::json;

use crate::core::ledger::{AdmitReply, AdmitRequest};
use crate::core::types::{BlockHash, Millis, SessionId, Tokens};
use crate::wire::admit::{AdmitAnswer, AdmitHead, Lease, LeaseCall, decode};
use crate::wire::info::KvRole;

use super::super::builtin::state::State;
use super::super::error::NodeError;
use super::{App, Body, json};

/// The form for curl: the whole chain, in JSON.
#[derive(Debug, Deserialize)]
struct PlainAdmit {
    request_id: String,
    session: SessionId,
    #[serde(default)]
    turn: u32,
    input_len: Tokens,
    #[serde(default)]
    append_len: Tokens,
    #[serde(default)]
    output_reserve: Tokens,
    #[serde(default)]
    prefix_hashes: Vec<BlockHash>,
}

/// `POST /admit_direct_append`.
pub fn admit(app: &App, body: &[u8], plain: bool) -> Result<Response<Body>, NodeError> {
    app.role(KvRole::Decode)?;
    app.takes_new_turns()?;
    let (head, hashes) = if plain { read_plain(body) } else { decode(body) }
        .map_err(|e| NodeError::bad_request(format!("admit request: {e}")))?;
    let block = Tokens::from(app.info.block_tokens);
    if (Tokens::from(head.known) + hashes.len() as Tokens) * block > head.input_len {
        return Err(NodeError::bad_request("the chain is longer than input_len"));
    }
    let answer = app.engine.with(|s, now| match resolve(s, &head, hashes) {
        None => AdmitAnswer::Resend,
        Some(chain) => answer(s, app.engine.epoch, head, chain, now),
    });
    json(&answer)
}

fn read_plain(body: &[u8]) -> Result<(AdmitHead, Vec<BlockHash>), String> {
    let plain: PlainAdmit = serde_json::from_slice(body).map_err(|e| e.to_string())?;
    let head = AdmitHead {
        request_id: plain.request_id,
        session: plain.session,
        turn: plain.turn,
        input_len: plain.input_len,
        append_len: plain.append_len,
        output_reserve: plain.output_reserve,
        known: 0,
        known_hash: None,
    };
    Ok((head, plain.prefix_hashes))
}

/// The whole chain: the known part from what the session holds. `None`: it does not hold that.
fn resolve(state: &State, head: &AdmitHead, appended: Vec<BlockHash>) -> Option<Vec<BlockHash>> {
    let Some(last) = head.known_hash else { return Some(appended) };
    let held = state.ledger.residency().get(&head.session)?;
    let known = held.chain.get(..head.known as usize)?;
    if known.last() != Some(&last) {
        return None;
    }
    Some([known, &appended].concat())
}

fn answer(state: &mut State, epoch: u64, head: AdmitHead, chain: Vec<BlockHash>, now: Millis) -> AdmitAnswer {
    let request = AdmitRequest {
        request_id: head.request_id,
        session: head.session,
        turn: head.turn,
        chain: chain.into(),
        input_len: head.input_len,
        output_reserve: head.output_reserve,
    };
    match state.admit(&request, now) {
        AdmitReply::Admitted { mode, reuse_blocks, reserved, expires_at, terms } => {
            let ttl_ms = expires_at.saturating_sub(now);
            let lease = Lease { request_id: request.request_id, epoch, tokens: reserved, ttl_ms };
            AdmitAnswer::Admitted { lease, mode, reuse_blocks, terms }
        }
        AdmitReply::Rejected { reason, terms } => AdmitAnswer::Rejected { reason, terms },
        AdmitReply::Stale => AdmitAnswer::Stale,
    }
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
    let known = call.epoch == app.engine.epoch
        && app.engine.with(|s, now| match action {
            LeaseAction::Release => s.give_back(&call.request_id, now),
            LeaseAction::Renew => s.ledger.renew(&call.request_id, now),
        });
    json(&json!({"known": known}))
}
