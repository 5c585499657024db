//! What a leg of a turn comes to: an answer for the client, or trouble.

use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderName, HeaderValue};
use bytes::Bytes;

use super::client::{Body, Response, SendError};
use crate::actors::api::Failure;

/// Longest error body that is kept; also what is read of a P's answer.
pub(super) const ERROR_MAX: usize = 64 << 10;

/// A worker's answer, fit for the client.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its headers, hop-by-hop ones included.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Its bytes.
    pub body: AnswerBody,
}

/// The bytes of an answer.
#[derive(Debug)]
pub enum AnswerBody {
    /// Still arriving. Its first bytes are here: until a worker has begun to answer, its death costs nothing.
    Stream(Bytes, Body),
    /// All of it: an error, or an empty body.
    Whole(Bytes),
}

/// Why there is no answer for the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// Nothing reached the client; the turn may be placed anew.
    #[error("{0:?}")]
    Replace(Failure),
    /// A worker broke the protocol.
    #[error("worker broke the protocol: {0}")]
    Broken(&'static str),
}

/// Headers as the client takes them.
pub(super) fn as_bytes<'a>(headers: &'a [(&'static str, String)]) -> Vec<(&'static str, &'a [u8])> {
    headers.iter().map(|(name, value)| (*name, value.as_bytes())).collect()
}

/// What D's answer means for the turn. `about_plan`: whether an error is about the plan and not about the request.
pub(super) async fn decoded(
    response: Result<Response, SendError>,
    about_plan: impl FnOnce(StatusCode, &[u8]) -> bool,
) -> Result<Answer, Trouble> {
    let mut response = match response {
        Ok(response) => response,
        Err(SendError::Malformed(what)) => return Err(Trouble::Broken(what)),
        Err(_) => return Err(Trouble::Replace(Failure::DecodeUnreachable)),
    };
    if !response.status.is_client_error() && !response.status.is_server_error() {
        return begun(response).await;
    }
    let body = response.body.read_up_to(ERROR_MAX).await;
    let body = body.map_err(|_| Trouble::Replace(Failure::DecodeUnreachable))?;
    match response.status {
        status if is_busy(status) => Err(Trouble::Replace(Failure::Busy)),
        status if about_plan(status, &body) => Err(Trouble::Replace(Failure::PlanMismatch)),
        _ => Ok(whole(response, body)),
    }
}

/// Whether a worker takes nothing now.
pub(super) fn is_busy(status: StatusCode) -> bool {
    matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
}

/// Waits for a good answer's first bytes.
async fn begun(response: Response) -> Result<Answer, Trouble> {
    let Response { status, headers, mut body } = response;
    let body = match body.chunk().await {
        Ok(Some(first)) => AnswerBody::Stream(first, body),
        Ok(None) => AnswerBody::Whole(Bytes::new()),
        Err(_) => return Err(Trouble::Replace(Failure::DecodeUnreachable)),
    };
    Ok(Answer { status, headers, body })
}

pub(super) fn whole(response: Response, body: Bytes) -> Answer {
    let Response { status, headers, .. } = response;
    Answer { status, headers, body: AnswerBody::Whole(body) }
}

/// P's answer where it is a good one, else the verdict on the turn: a refusal of the request is an answer for the
/// client, since D would say the same; without a P that works the turn is placed anew.
pub(super) async fn prefilled(
    answered: Result<Response, SendError>,
) -> Result<Response, Result<Answer, Trouble>> {
    let lost = || Err(Trouble::Replace(Failure::PrefillUnreachable));
    let mut response = match answered {
        Ok(response) => response,
        Err(SendError::Malformed(what)) => return Err(Err(Trouble::Broken(what))),
        Err(_) => return Err(lost()),
    };
    let status = response.status;
    if status.is_success() {
        return Ok(response);
    }
    let body = response.body.read_up_to(ERROR_MAX).await.map_err(|_| lost())?;
    Err(match status {
        // A busy one is no broken one.
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            Err(Trouble::Replace(Failure::PrefillBusy))
        }
        status if status.is_client_error() => Ok(whole(response, body)),
        _ => lost(),
    })
}
