//! `POST /v1/messages/count_tokens`: any D answers it, or the gateway when their engine has no such call. It is
//! nobody's turn and leaves nothing behind.

use std::time::Duration;

use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse};
use serde_json::json;

use super::backend::{Backend, Incoming};
use super::errors::{ApiError, Dialect};
use super::meter::Meter;
use super::turn::{pass_headers, with_query};
use super::{Local, body, headers};
use crate::engines::client::Request;
use crate::prompt::Api;

const PATH: &str = "/v1/messages/count_tokens";
/// Longest answer that is passed on.
const ANSWER_MAX: usize = 64 << 10;
/// Workers asked, one after another, when they fail.
const TRIES: usize = 3;

/// Passes the request to a D and its answer back.
pub(super) async fn count_tokens<B: Backend>(
    req: HttpRequest,
    payload: Payload,
    local: Data<Local<B>>,
) -> Result<HttpResponse, ApiError> {
    let mut meter = Meter::begin(&local.front.tally);
    let limit = Duration::from_secs(local.front.http().first_byte_timeout_s);
    let counted = tokio::time::timeout(limit, count(&req, payload, &local)).await;
    match counted.unwrap_or_else(|_| Err(ApiError::worker_silent())) {
        Ok(response) => {
            meter.ends("probe", "count_tokens");
            Ok(response)
        }
        Err(error) => {
            meter.fails(&error);
            Err(error.spoken(Dialect::Anthropic))
        }
    }
}

async fn count<B: Backend>(
    req: &HttpRequest,
    payload: Payload,
    local: &Local<B>,
) -> Result<HttpResponse, ApiError> {
    let caller = local.front.access.caller(req.headers())?;
    let _permit = local.backend.gate().enter().ok_or_else(ApiError::overloaded)?;
    let http = local.front.http();
    let within = Duration::from_secs(http.request_timeout_s);
    let body = body::read(req, payload, http.body_limit_mib, within).await?;
    if !local.fleet.speaks(Api::Messages) {
        let incoming = Incoming {
            path: PATH,
            headers: req.headers(),
            body: &body,
            sent: None,
            hint: None,
            explain: false,
        };
        let tokens = local.backend.count(incoming)?;
        return Ok(HttpResponse::Ok().json(json!({"input_tokens": tokens})));
    }
    let mut request = Request::post(with_query(PATH, req), local.passed(Api::Messages, body)?.body);
    headers::forward(req.headers(), caller.by_key || local.client.shows_key(), &mut request);
    for nth in 0..TRIES {
        let Some(worker) = local.backend.anyone(nth) else { break };
        let Ok(mut answer) = local.client.send(&worker.url, &request, &[]).await else { continue };
        let Ok(bytes) = answer.body.read_up_to(ANSWER_MAX).await else { continue };
        let mut response = HttpResponse::build(answer.status);
        pass_headers(&answer.headers, &mut response);
        return Ok(response.body(bytes));
    }
    Err(match local.backend.ready() {
        true => ApiError::worker_died(),
        false => ApiError::no_workers(),
    })
}
