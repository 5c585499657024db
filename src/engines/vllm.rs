//! A turn at vLLM with its NIXL connector. P gets the prompt with one token to answer and returns handles on its KV;
//! D gets the client's body with those handles and pulls the blocks it does not have. Alone, D gets the body as any
//! client would send it.
//!
//! Clients cannot bring handles of their own: they would read other clients' KV.

use actix_web::http::StatusCode;
use bytes::Bytes;

use super::answer::{Answer, ERROR_MAX, Trouble, decoded, whole};
use super::client::{Client, Request, Response, SendError};
use crate::actors::api::{DispatchPlan, Failure};
use crate::prompt::{Api, members, rewrite};

/// The member that carries handles, in requests and answers.
pub(super) const PARAMS: &str = "kv_transfer_params";
/// Tells P to keep its blocks until they are read.
const REMOTE_DECODE: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
/// What has no place in a request for one token, or would be refused there. None of it changes the prompt.
const DROPPED: [&str; 9] = [
    "stream_options",
    "n",
    "best_of",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "background",
];

/// Executes `plan`. See [`super::Engine::execute`].
pub(super) async fn execute(
    client: &Client,
    plan: &DispatchPlan,
    request: &Request,
    prefill_done: impl FnOnce(),
) -> Result<Answer, Trouble> {
    let extra = [("x-request-id", plan.request_id.as_bytes())];
    // Handles are read once: they cannot serve several answers.
    let Some(prefill) = plan.prefill.as_ref().filter(|_| !asks_for_several(request.body())) else {
        prefill_done();
        let request = request.with_body(changed(request.body(), &[], &[PARAMS]));
        return decoded(client.send(&plan.decode.url, &request, &extra).await, |_, _| false).await;
    };
    let first = one_token(request, REMOTE_DECODE);
    let params = match prefilled(client.send(&prefill.url, &first, &extra).await).await {
        Ok(params) => params,
        Err(verdict) => return verdict,
    };
    prefill_done();
    let second = request.with_body(changed(request.body(), &[(PARAMS, &params)], &[]));
    let answered = client.send(&plan.decode.url, &second, &extra).await;
    // What D answers when it cannot load P's blocks. Another P, or none, will do.
    match decoded(answered, |status, _| status == StatusCode::INTERNAL_SERVER_ERROR).await {
        Err(Trouble::Replace(Failure::PlanMismatch)) => {
            let (p, d) = (&prefill.name, &plan.decode.name);
            tracing::warn!(%p, %d, "a decode worker could not load what its prefill worker computed");
            Err(Trouble::Replace(Failure::PrefillUnreachable))
        }
        other => other,
    }
}

fn asks_for_several(body: &[u8]) -> bool {
    let [n, best_of] = members(body, ["n", "best_of"]);
    [n, best_of].into_iter().flatten().any(|text| !matches!(text, b"1" | b"null"))
}

fn changed(body: &Bytes, set: &[(&str, &str)], drop: &[&str]) -> Bytes {
    // The body was parsed before it was placed; should it not be an object after all, its engine says so.
    rewrite(body, set, drop).map_or_else(|_| body.clone(), Bytes::from)
}

/// The request for the same prompt with one token to answer, in one piece.
pub(super) fn one_token(request: &Request, params: &str) -> Request {
    let body = request.body();
    let api = request.api();
    let mut set = vec![("stream", "false"), (PARAMS, params)];
    set.extend(match api {
        Api::Chat => &[("max_tokens", "1"), ("max_completion_tokens", "1")][..],
        Api::Responses => &[("max_output_tokens", "1")],
        Api::Completions | Api::Messages => &[("max_tokens", "1")],
    });
    // A call that must be made cannot be made in one token. The template sees the tools all the same.
    let [tools] = members(body, ["tools"]);
    match api {
        Api::Chat | Api::Responses if tools.is_some() => set.push(("tool_choice", "\"none\"")),
        _ => {}
    }
    let drop: Vec<&str> =
        DROPPED.into_iter().chain((api == Api::Messages).then_some("tool_choice")).collect();
    request.with_body(changed(body, &set, &drop))
}

/// P's answer: its handles.
async fn prefilled(answered: Result<Response, SendError>) -> Result<String, Result<Answer, Trouble>> {
    let lost = || Err(Trouble::Replace(Failure::PrefillUnreachable));
    let mut response = match answered {
        Ok(response) => response,
        Err(SendError::Malformed(what)) => return Err(Err(Trouble::Broken(what))),
        Err(_) => return Err(lost()),
    };
    let body = response.body.read_up_to(PARAMS_MAX).await.map_err(|_| lost())?;
    let status = response.status;
    if status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS {
        // The request is at fault, and D would say the same.
        return Err(Ok(whole(response, body.slice(..body.len().min(ERROR_MAX)))));
    }
    match handles(&body).filter(|_| status.is_success()) {
        Some(params) => Ok(params),
        None => {
            if status.is_success() {
                tracing::warn!("a prefill worker returned no handles: was it started with a KV connector?");
            }
            Err(lost())
        }
    }
}

/// Longest answer of a P: its handles name every block.
const PARAMS_MAX: usize = 4 << 20;

/// The handles in an answer.
pub(super) fn handles(body: &[u8]) -> Option<String> {
    let [params] = members(body, [PARAMS]);
    let params = params.filter(|text| text.starts_with(b"{"))?;
    String::from_utf8(params.to_vec()).ok()
}

#[cfg(test)]
#[path = "vllm_tests.rs"]
mod tests;
