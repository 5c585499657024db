//! A turn at any server with the OpenAI API: one leg, the client's body as it came. A server with fixed slots
//! (llama.cpp) is told which one to use, so that a session stays where its KV is.

use bytes::Bytes;

use super::Legs;
use super::answer::{Answer, Trouble, as_bytes, decoded};
use super::builtin::replaceable;
use super::client::{Client, Request};
use crate::actors::api::DispatchPlan;
use crate::prompt::rewrite;

/// Executes `plan`. See [`super::Engine::execute`].
pub(super) async fn execute(
    client: &Client,
    plan: &DispatchPlan,
    request: &Request,
    legs: &Legs,
) -> Result<Answer, Trouble> {
    let slotted = plan.slot.and_then(|slot| {
        // The body was parsed before it was placed; should it not be an object after all, its engine says so.
        let members = [("id_slot", slot.to_string()), ("cache_prompt", "true".to_owned())];
        let members = members.each_ref().map(|(name, value)| (*name, value.as_str()));
        rewrite(request.body(), &members, &[]).ok()
    });
    let request = match slotted {
        Some(body) => &request.with_body(Bytes::from(body)),
        None => request,
    };
    decoded(client.send(&plan.decode.url, request, &as_bytes(&legs.decode)).await, replaceable).await
}
