//! A turn whose P and D work at the same time and meet by themselves: D waits for P's KV.

use std::time::Duration;

use super::answer::{Answer, Trouble, prefilled};
use super::client::{Response, SendError};
use crate::actors::api::Failure;

/// How long one leg's failure waits for the other's: the one that explains the other decides.
const GRACE: Duration = Duration::from_millis(250);

/// Runs both legs; D's answer is the client's. `prefill_done` is called when P has done its part.
pub(super) async fn both(
    prefill: impl Future<Output = Result<Response, SendError>>,
    decode: impl Future<Output = Result<Answer, Trouble>>,
    prefill_done: impl FnOnce(),
) -> Result<Answer, Trouble> {
    let (mut prefill, mut decode) = (std::pin::pin!(drained(prefill)), std::pin::pin!(decode));
    // Dropping a leg cancels it: a D whose P has died would wait for minutes.
    tokio::select! {
        biased;
        done = &mut prefill => match done {
            Ok(()) => {
                prefill_done();
                decode.await
            }
            Err(verdict) => verdict,
        },
        answer = &mut decode => match answer {
            // D has begun, so the KV is there, and P has nothing left to say.
            Ok(answer) if answer.status.is_success() => {
                prefill_done();
                Ok(answer)
            }
            // D may have failed because P did.
            failed => match tokio::time::timeout(GRACE, prefill).await {
                Ok(Err(verdict)) => verdict,
                _ => failed,
            },
        },
    }
}

/// P's leg up to its end.
async fn drained(
    leg: impl Future<Output = Result<Response, SendError>>,
) -> Result<(), Result<Answer, Trouble>> {
    let lost = |_| Err(Trouble::Replace(Failure::PrefillUnreachable));
    let mut response = prefilled(leg.await).await?;
    while response.body.chunk().await.map_err(lost)?.is_some() {}
    Ok(())
}
