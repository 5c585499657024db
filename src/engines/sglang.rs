//! A turn at SGLang: P and D get the same request at once, and a room in which P's bootstrap server lets them meet.
//! D's answer is the client's; P's is read and dropped. The room travels in headers where SGLang reads them there, so
//! that the body passes as it came.
//!
//! A D with this project's plugin computes a request without a room itself, and says whether it has room for it.

use std::time::Duration;

use bytes::Bytes;

use super::answer::{Answer, Trouble, as_bytes, decoded};
use super::builtin::replaceable;
use super::client::{Client, Request};
use super::fetch::{Fetch, Unwell};
use super::{Legs, pair, without};
use crate::actors::api::DispatchPlan;
use crate::prompt::{Api, members, rewrite};
use crate::wire::admit::AdmitHead;

/// The members that name the room.
const MEMBERS: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];
/// Its headers, on the paths that know them.
const HEADERS: [&str; 3] =
    ["x-override-bootstrap-host", "x-override-bootstrap-port", "x-override-bootstrap-room"];

/// Executes `plan`. See [`super::Engine::execute`].
pub(super) async fn execute(
    client: &Client,
    plan: &DispatchPlan,
    request: &Request,
    legs: &Legs,
    prefill_done: impl FnOnce(),
) -> Result<Answer, Trouble> {
    let Some(prefill) = &plan.prefill else {
        prefill_done();
        let alone = request.with_body(without(request.body(), MEMBERS));
        return decoded(client.send(&plan.decode.url, &alone, &as_bytes(&legs.decode)).await, replaceable)
            .await;
    };
    let meeting = prefill.kv_addr.as_deref().and_then(|at| at.rsplit_once(':'));
    let (host, port) = meeting.ok_or(Trouble::Broken("a prefill server without a bootstrap port"))?;
    // Any number that no other turn has now; SGLang takes 63 bits.
    let room = (rand::random::<u64>() >> 1).to_string();
    let (request, headers) = invited(request, [host, port, &room]);
    let (mut to_d, mut to_p) = (as_bytes(&legs.decode), as_bytes(&legs.prefill));
    for extra in [&mut to_d, &mut to_p] {
        extra.extend(headers.iter().map(|(name, value)| (*name, value.as_bytes())));
    }
    let prefill = client.send(&prefill.url, &request, &to_p);
    let decode = async { decoded(client.send(&plan.decode.url, &request, &to_d).await, replaceable).await };
    pair::both(prefill, decode, prefill_done).await
}

/// Longest wait for a D's own word on an admission.
const ADMITS: Duration = Duration::from_secs(2);

/// Asks D's plugin. See [`super::Engine::admits`].
pub(super) async fn admits(fetch: &Fetch, url: &str, asked: &AdmitHead) -> Result<bool, Unwell> {
    let body = serde_json::to_vec(asked).map_err(|e| Unwell::Unfit(e.to_string()))?;
    let path = "/admit_direct_append";
    let (status, said) = fetch.post(&format!("{url}{path}"), body.into(), ADMITS).await?;
    let answer = serde_json::from_slice::<serde_json::Value>(&said).unwrap_or_default();
    match answer["answer"].as_str() {
        Some("admitted") => Ok(true),
        Some("rejected") => Ok(false),
        _ => Err(Unwell::Unfit(format!("{path} answered {status}: is the plugin installed?"))),
    }
}

/// The request with the room in it, and the headers that name the room instead where those will do.
fn invited(request: &Request, room: [&str; 3]) -> (Request, Vec<(&'static str, String)>) {
    let body = request.body();
    let [n, prompt, own_host, own_port, own_room] =
        members(body, ["n", "prompt", MEMBERS[0], MEMBERS[1], MEMBERS[2]]);
    let several = count(n, prompt);
    // A client's own room would lead D to another client's KV.
    let clean = [own_host, own_port, own_room].iter().all(Option::is_none);
    if request.api() == Api::Chat && several == 1 && clean {
        return (request.clone(), HEADERS.into_iter().zip(room.map(str::to_owned)).collect());
    }
    let host = serde_json::Value::from(room[0]).to_string();
    let values = match several {
        1 => [host, room[1].to_owned(), room[2].to_owned()],
        several => {
            let rooms: Vec<String> = (0..several).map(|_| (rand::random::<u64>() >> 1).to_string()).collect();
            let repeated = |text: &str| format!("[{}]", vec![text; several].join(","));
            [repeated(&host), repeated(room[1]), format!("[{}]", rooms.join(","))]
        }
    };
    let set: Vec<(&str, &str)> = MEMBERS.into_iter().zip(values.iter().map(String::as_str)).collect();
    let body = rewrite(body, &set, &[]).map_or_else(|_| body.clone(), Bytes::from);
    (request.with_body(body), Vec::new())
}

/// How many answers a request asks for.
fn count(n: Option<&[u8]>, prompt: Option<&[u8]>) -> usize {
    let n = n.and_then(|n| std::str::from_utf8(n).ok()?.parse().ok()).unwrap_or(1);
    let prompts = prompt.and_then(|p| serde_json::from_slice::<Vec<serde_json::Value>>(p).ok());
    // An array of numbers is one prompt.
    let batch = prompts.filter(|list| list.first().is_some_and(|first| !first.is_number()));
    batch.map_or(1, |list| list.len()).max(1) * n.clamp(1, 128)
}

#[cfg(test)]
#[path = "sglang_tests.rs"]
mod tests;
