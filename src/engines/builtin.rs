//! A turn at builtin workers: one leg (D computes all it lacks) or two at once (P computes and pushes, D
//! waits for the blocks and decodes). All control travels in the `x-kvc-plan` header; the client's body goes
//! to both legs as it came.

use std::time::Duration;

use actix_web::http::StatusCode;

use futures_util::FutureExt as _;

use super::answer::{Answer, ERROR_MAX, Trouble, decoded, is_busy, whole};
use super::client::{Client, Request, Response, SendError};
use crate::actors::api::{DispatchPlan, Failure, WorkerRef};
use crate::core::types::Rung;
use crate::prompt::rewrite;
use crate::wire::plan::{CONTINUE, Continue, PLAN_HEADER, Plan, Pull, Push};

/// `error.code` of a D that holds fewer blocks than the plan relies on (status 409).
pub const PLAN_MISMATCH: &str = "kvc_plan_mismatch";
/// `error.code` of either side when the blocks did not arrive, whoever is to blame.
pub const TRANSFER_FAILED: &str = "kvc_transfer_failed";

/// How long one leg's failure waits for the other leg's: the one that explains the other decides.
const GRACE: Duration = Duration::from_millis(250);

/// Executes `plan` with the client's `request`. Dropping the future closes the connections of all legs.
/// `prefill_done` is called when P has done its part; D may take much longer.
///
/// An answer may have any status: a worker's own refusal of the request is an answer. With two legs it is
/// returned when P is done, so P's refusal always wins over D's.
///
/// # Errors
/// [`Trouble`]; all legs are closed then.
pub async fn execute(
    client: &Client,
    plan: &DispatchPlan,
    request: &Request,
    prefill_done: impl FnOnce(),
) -> Result<Answer, Trouble> {
    let pull = decode_plan(plan);
    let decode = send(client, plan, &plan.decode, &pull, request);
    let Some(prefill) = &plan.prefill else {
        return decoded(decode.await, replaceable).await;
    };
    let push = prefill_plan(plan).ok_or(Trouble::Broken("a decode worker without a KV address"))?;
    let mut decode = std::pin::pin!(decode);
    let mut prefill = std::pin::pin!(prefilled(send(client, plan, prefill, &push, request), restores(plan)));
    // Biased: when both legs are ready, P's verdict is read first.
    tokio::select! {
        biased;
        done = &mut prefill => match done {
            Ok(()) => {
                prefill_done();
                decoded(decode.await, replaceable).await
            }
            Err(verdict) if verdict.is_own() => match decode.now_or_never() {
                // Both are busy: D's word counts, or it would be asked again.
                Some(Ok(response)) if verdict.is_busy() && is_busy(response.status) => {
                    decoded(Ok(response), replaceable).await
                }
                _ => verdict.0,
            },
            // P may have failed because D died: then D's failure is the one to act on.
            Err(verdict) => match tokio::time::timeout(GRACE, decode).await {
                Ok(Err(_)) => Err(Trouble::Replace(Failure::DecodeUnreachable)),
                // Or because D, which is busy, did not take its blocks: then it must not be asked again.
                Ok(Ok(response)) if is_busy(response.status) => decoded(Ok(response), replaceable).await,
                _ => verdict.0,
            },
        },
        response = &mut decode => match response {
            Ok(response) if response.status.is_success() => match prefill.await {
                Ok(()) => {
                    prefill_done();
                    decoded(Ok(response), replaceable).await
                }
                Err(verdict) => verdict.0,
            },
            Err(SendError::Connect) => Err(Trouble::Replace(Failure::DecodeUnreachable)),
            // That is D's own, whatever becomes of P: a D that is busy must not be asked again.
            Ok(response) if is_busy(response.status) => decoded(Ok(response), replaceable).await,
            // D may have failed because P did.
            failed => match tokio::time::timeout(GRACE, prefill).await {
                Ok(Err(verdict)) if verdict.is_own() => verdict.0,
                _ => decoded(failed, replaceable).await,
            },
        },
    }
}

/// The same request, of whose answer `begun` was sent already.
pub(super) fn continued(request: &Request, begun: &Continue) -> Option<Request> {
    let begun = serde_json::to_string(begun).ok()?;
    let body = rewrite(request.body(), &[(CONTINUE, &begun)], &[]).ok()?;
    Some(request.with_body(body.into()))
}

/// What P's failure means for the turn.
struct Verdict(Result<Answer, Trouble>);

impl Verdict {
    /// Whether P said that it is busy.
    fn is_busy(&self) -> bool {
        matches!(self.0, Err(Trouble::Replace(Failure::PrefillBusy)))
    }

    /// Whether the failure is P's own (the request, P itself) and not one of the transfer.
    fn is_own(&self) -> bool {
        match &self.0 {
            Ok(answer) => answer.status.is_client_error(),
            Err(Trouble::Replace(failure)) => {
                matches!(failure, Failure::PrefillUnreachable | Failure::PrefillBusy)
            }
            Err(Trouble::Broken(_)) => true,
        }
    }
}

/// P's leg up to the acknowledged push.
async fn prefilled(
    leg: impl Future<Output = Result<Response, SendError>>,
    restore: bool,
) -> Result<(), Verdict> {
    let mut response = match leg.await {
        Ok(response) => response,
        Err(SendError::Malformed(what)) => return Err(Verdict(Err(Trouble::Broken(what)))),
        Err(_) => return Err(Verdict(Err(Trouble::Replace(Failure::PrefillUnreachable)))),
    };
    let body = response.body.read_up_to(ERROR_MAX).await;
    let body = body.map_err(|_| Verdict(Err(Trouble::Replace(Failure::PrefillUnreachable))))?;
    if response.status.is_success() {
        return Ok(());
    }
    if is_busy(response.status) {
        // A busy P computed nothing; its refusal says nothing about the request.
        return Err(Verdict(Err(Trouble::Replace(Failure::PrefillBusy))));
    }
    // A P that cannot restore says nothing about the request: others can compute what it does not send.
    Err(Verdict(if restore || replaceable(response.status, &body) {
        Err(Trouble::Replace(Failure::PlanMismatch))
    } else {
        Ok(whole(response, body))
    }))
}

/// Whether an error is about the plan or its transfer and not about the client's request.
pub(super) fn replaceable(status: StatusCode, body: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Outer<'a> {
        #[serde(borrow)]
        error: Inner<'a>,
    }
    #[derive(serde::Deserialize)]
    struct Inner<'a> {
        #[serde(borrow)]
        code: Option<&'a str>,
    }
    let code = serde_json::from_slice::<Outer<'_>>(body).ok().and_then(|outer| outer.error.code);
    match code {
        Some(PLAN_MISMATCH) => status == StatusCode::CONFLICT,
        Some(TRANSFER_FAILED) => true,
        _ => false,
    }
}

async fn send(
    client: &Client,
    turn: &DispatchPlan,
    worker: &WorkerRef,
    leg: &Plan,
    request: &Request,
) -> Result<Response, SendError> {
    let header = header_json(leg);
    let extra = [("x-request-id", turn.request_id.as_bytes()), (PLAN_HEADER, header.as_bytes())];
    client.send(&worker.url, request, &extra).await
}

pub(super) fn decode_plan(turn: &DispatchPlan) -> Plan {
    Plan::Decode {
        request_id: turn.request_id.clone(),
        session: (!turn.one_shot).then(|| turn.session.clone()),
        mode: turn.mode,
        lease_epoch: turn.lease.as_ref().map(|lease| lease.epoch),
        reuse_blocks: turn.reuse_blocks,
        pull: turn.prefill.as_ref().map(|_| Pull {
            transfer_id: turn.request_id.clone(),
            from_block: turn.reuse_blocks,
            blocks: restores(turn).then_some(turn.restore_blocks),
        }),
        sync: turn.sync.clone(),
    }
}

fn prefill_plan(turn: &DispatchPlan) -> Option<Plan> {
    let (request_id, session) = (turn.request_id.clone(), turn.session.clone());
    let push = Push {
        transfer_id: turn.request_id.clone(),
        to: turn.decode.kv_addr.as_deref()?.to_owned(),
        from_block: turn.reuse_blocks,
    };
    Some(match restores(turn) {
        true => Plan::Restore { request_id, session, push, blocks: turn.restore_blocks },
        false => Plan::Prefill { request_id, session, push },
    })
}

fn restores(turn: &DispatchPlan) -> bool {
    turn.rung == Rung::Restore
}

/// A plan as a header value: JSON with everything beyond ASCII escaped.
pub(super) fn header_json(plan: &Plan) -> String {
    // A struct of strings and numbers cannot fail to serialise.
    let json = serde_json::to_string(plan).unwrap_or_default();
    if json.is_ascii() {
        return json;
    }
    let mut units = [0; 2];
    json.chars().fold(String::with_capacity(json.len() * 2), |mut out, c| {
        if c.is_ascii() {
            out.push(c);
        } else {
            for unit in c.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
        out
    })
}

#[cfg(test)]
#[path = "builtin_tests.rs"]
pub(super) mod tests;
