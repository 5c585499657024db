//! A turn at vLLM. With its NIXL connector P gets the prompt with one token to answer and returns handles on its KV; D gets
//! the client's body with those handles and pulls the blocks it does not have. With the Mooncake connector both get their
//! parts at once (`super::mooncake`). Alone, D gets the body as any client would send it.
//!
//! Clients cannot bring handles of their own: they would read other clients' KV.

use std::time::Duration;

use actix_web::http::StatusCode;
use bytes::Bytes;

use super::answer::{Answer, Trouble, as_bytes, decoded, prefilled};
use super::builtin::replaceable;
use super::client::{Client, Request, Response, SendError};
use super::fetch::Fetch;
use super::mooncake::Transfer;
use super::{Handed, Legs, Pair, pair, without};
use crate::actors::api::{DispatchPlan, Failure};
use crate::prompt::{Api, members, rewrite};

/// The member that carries handles, in requests and answers.
pub(super) const PARAMS: &str = "kv_transfer_params";
/// Tells an engine to keep its blocks until they are read, and to return handles on them.
const REMOTE_DECODE: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
/// Longest time for a handing back.
const HAND_BACK: Duration = Duration::from_secs(30);
/// Longest time for each half of an introduction.
const INTRODUCTION: Duration = Duration::from_secs(20);
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
    legs: &Legs,
    prefill_done: impl FnOnce(),
) -> Result<Answer, Trouble> {
    let to_d = as_bytes(&legs.decode);
    // Handles are read once: they cannot serve several answers.
    let Some(prefill) = plan.prefill.as_ref().filter(|_| !asks_for_several(request.body())) else {
        prefill_done();
        let request = request.with_body(without(request.body(), [PARAMS]));
        return decoded(client.send(&plan.decode.url, &request, &to_d).await, replaceable).await;
    };
    if let Some(transfer) = prefill.kv_addr.as_deref().and_then(Transfer::new) {
        let to_p = as_bytes(&legs.prefill);
        let first = one_token(request, &transfer.prefill);
        let second = request.with_body(changed(request.body(), &[(PARAMS, &transfer.decode)], &[]));
        let decode = async { pulled(plan, client.send(&plan.decode.url, &second, &to_d).await).await };
        return pair::both(client.send(&prefill.url, &first, &to_p), decode, prefill_done).await;
    }
    let first = one_token(request, REMOTE_DECODE);
    let params = match handed_over(client.send(&prefill.url, &first, &as_bytes(&legs.prefill)).await).await {
        Ok(params) => params,
        Err(verdict) => return verdict,
    };
    prefill_done();
    let second = request.with_body(changed(request.body(), &[(PARAMS, &params)], &[]));
    pulled(plan, client.send(&plan.decode.url, &second, &to_d).await).await
}

/// D's answer to a turn whose KV it had to pull.
async fn pulled(plan: &DispatchPlan, answered: Result<Response, SendError>) -> Result<Answer, Trouble> {
    match decoded(answered, replaceable).await {
        // What D answers when it cannot load P's blocks. Another P, or none, will do.
        Ok(answer) if answer.status == StatusCode::INTERNAL_SERVER_ERROR => {
            let (p, d) = (plan.prefill.as_ref().map(|p| &p.name), &plan.decode.name);
            tracing::warn!(?p, %d, "a decode worker could not load what its prefill worker computed");
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

/// Hands D's KV of a prompt to P: the two steps of a seed, the other way round. D, asked for one token more, finds the
/// prompt in its cache, keeps its blocks and returns handles; P, asked for one token with those, pulls what it lacks. The
/// prompt is the same text for both, so its tokens are the same, and the handles cover it exactly. They are used at once,
/// and both have their blocks free again.
///
/// vLLM's own way back (`bidirectional_kv_xfer`) would not do. A D with it keeps the blocks of every turn that came
/// through a P for minutes; the handles cover an answer whose tokens P does not know, and streamed answers carry none;
/// and a turn that asks D to keep its blocks with both flags false keeps them for ever, since its worker never heard of
/// it (0.32).
pub(super) async fn hand_back(
    client: &Client,
    request_id: &str,
    request: &Request,
    (decode, prefill): (&str, &str),
) -> Handed {
    let ask = async |url: &str, params: &str, id: String| {
        let request = one_token(request, params);
        let mut response = client.send(url, &request, &[("x-request-id", id.as_bytes())]).await.ok()?;
        let body = response.body.read_up_to(PARAMS_MAX).await.ok()?;
        response.status.is_success().then_some(body)
    };
    let handed = async {
        let Some(held) = ask(decode, REMOTE_DECODE, format!("{request_id}-held")).await else {
            return Handed::Failed;
        };
        let Some(params) = handles(&held) else { return Handed::NoHandles };
        match ask(prefill, &params, format!("{request_id}-back")).await {
            Some(_) => Handed::Stored,
            None => Handed::Failed,
        }
    };
    tokio::time::timeout(HAND_BACK, handed).await.unwrap_or(Handed::Failed)
}

/// A small turn over both, through the connection they have to make first: its handshake has 5 s, which an engine that
/// is busy may miss.
pub(super) async fn introduce(fetch: &Fetch, model: &str, who: Pair<'_>) -> Result<(), String> {
    let Pair { decode, prefill, meets } = who;
    let body = |params: &str| {
        let prompt = "One worker meets another. ".repeat(40);
        let head = serde_json::json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0});
        changed(&Bytes::from(head.to_string()), &[(PARAMS, params)], &[])
    };
    let ask = async |url: &str, params: &str| {
        let (status, body) = fetch
            .post(&format!("{url}/v1/completions"), body(params), INTRODUCTION)
            .await
            .map_err(|unwell| format!("{url}: {unwell}"))?;
        let said = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
        if status.is_success() { Ok(body) } else { Err(format!("{url} answered {status}: {said}")) }
    };
    if let Some(transfer) = meets.and_then(Transfer::new) {
        let both = tokio::try_join!(ask(prefill, &transfer.prefill), ask(decode, &transfer.decode));
        return both.map(drop);
    }
    let first = ask(prefill, REMOTE_DECODE).await?;
    let params = handles(&first);
    let params = params.ok_or_else(|| format!("{prefill} returns no handles: it has no KV connector"))?;
    let second = ask(decode, &params).await?;
    if handles(&second).is_some() {
        tracing::warn!(
            d = %decode,
            "it keeps the KV of each turn that came through a P for minutes: start it without `bidirectional_kv_xfer`"
        );
    }
    Ok(())
}

/// P's answer: its handles.
async fn handed_over(answered: Result<Response, SendError>) -> Result<String, Result<Answer, Trouble>> {
    let lost = || Err(Trouble::Replace(Failure::PrefillUnreachable));
    let mut response = prefilled(answered).await?;
    let body = response.body.read_up_to(PARAMS_MAX).await.map_err(|_| lost())?;
    handles(&body).ok_or_else(|| {
        tracing::warn!("a prefill worker returned no handles: was it started with a KV connector?");
        lost()
    })
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
