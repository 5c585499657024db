//! One request from its first byte to the head of its answer.

use std::time::Duration;

use actix_web::http::header::{self, HeaderName, HeaderValue};
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder};
use tokio::sync::OwnedSemaphorePermit;

use super::Local;
use super::backend::{Backend, Incoming, Turn};
use super::body;
use super::errors::ApiError;
use super::headers::{self, value};
use super::meter::Meter;
use super::relay::{After, Relay};
use crate::actors::api::{DispatchPlan, Failure};
use crate::engines::answer::{Answer, AnswerBody, Trouble};
use crate::engines::client::Request;
use crate::prompt::Api;
use crate::wire::plan::{REPORT_HEADER, Report};

/// A turn is placed anew at most this often after failures.
const REPLACEMENTS: u32 = 3;

/// `POST /v1/chat/completions`.
pub(super) async fn chat<B: Backend>(
    req: HttpRequest,
    payload: Payload,
    local: Data<Local<B>>,
) -> Result<HttpResponse, ApiError> {
    serve(Api::Chat, req, payload, local).await
}

/// `POST /v1/completions`.
pub(super) async fn completions<B: Backend>(
    req: HttpRequest,
    payload: Payload,
    local: Data<Local<B>>,
) -> Result<HttpResponse, ApiError> {
    serve(Api::Completions, req, payload, local).await
}

/// `POST /v1/responses`.
pub(super) async fn responses<B: Backend>(
    req: HttpRequest,
    payload: Payload,
    local: Data<Local<B>>,
) -> Result<HttpResponse, ApiError> {
    serve(Api::Responses, req, payload, local).await
}

/// `POST /v1/messages`.
pub(super) async fn messages<B: Backend>(
    req: HttpRequest,
    payload: Payload,
    local: Data<Local<B>>,
) -> Result<HttpResponse, ApiError> {
    serve(Api::Messages, req, payload, local).await
}

/// The path of an API as workers know it.
const fn path_of(api: Api) -> &'static str {
    match api {
        Api::Chat => "/v1/chat/completions",
        Api::Completions => "/v1/completions",
        Api::Responses => "/v1/responses",
        Api::Messages => "/v1/messages",
    }
}

/// Serves one turn. When the client leaves, actix drops this future, and with it every leg and the turn.
async fn serve<B: Backend>(
    api: Api,
    req: HttpRequest,
    payload: Payload,
    local: Data<Local<B>>,
) -> Result<HttpResponse, ApiError> {
    let mut meter = Meter::begin();
    let served = async {
        // Before the body is read: bodies are what an overload would fill the memory with.
        let permit = local.permits.clone().try_acquire_owned().map_err(|_| ApiError::overloaded())?;
        let (turn, answer, after) = answer(api, &req, payload, &local).await?;
        Ok((turn, answer, after, permit))
    };
    match served.await {
        Ok((turn, answer, after, permit)) => Ok(respond(api, turn, answer, after, meter, &local, permit)),
        Err(error) => {
            meter.fails(&error);
            Err(error.spoken(api.into()))
        }
    }
}

async fn answer<B: Backend>(
    api: Api,
    req: &HttpRequest,
    payload: Payload,
    local: &Local<B>,
) -> Result<(B::Turn, Answer, Option<After>), ApiError> {
    let (http, path) = (&local.http, path_of(api));
    let body =
        body::read(req, payload, http.body_limit_mib, Duration::from_secs(http.request_timeout_s)).await?;
    let explain = http.explain && req.headers().get(headers::EXPLAIN).is_some_and(|v| v.as_bytes() == b"1");
    let incoming = Incoming { path, headers: req.headers(), body: &body, explain };
    let mut request = Request::post(with_query(path, req), local.passed(api, body.clone())?);
    headers::forward(req.headers(), &mut request);
    let answered = async {
        let turn = local.backend.place(incoming).await?;
        let (turn, answer) = run(local, turn, &request).await?;
        let after = (local.engine.hands_back() && !turn.plan().sync.is_empty()).then(|| After {
            engine: local.engine.clone(),
            client: local.client.clone(),
            request: request.clone(),
        });
        Ok((turn, answer, after))
    };
    tokio::time::timeout(Duration::from_secs(http.first_byte_timeout_s), answered)
        .await
        .unwrap_or_else(|_| Err(ApiError::worker_silent()))
}

/// The path as workers know it, whatever scope an embedder mounted the gateway under.
pub(super) fn with_query(path: &'static str, req: &HttpRequest) -> String {
    match req.query_string() {
        "" => path.to_owned(),
        query => format!("{path}?{query}"),
    }
}

/// Executes a placed turn; a failure before the answer began places it anew.
async fn run<B: Backend>(
    local: &Local<B>,
    mut turn: B::Turn,
    request: &Request,
) -> Result<(B::Turn, Answer), ApiError> {
    let mut left = REPLACEMENTS;
    loop {
        let executed = tokio::select! {
            biased;
            executed = local.engine.execute(&local.client, turn.plan(), request, || turn.prefill_done()) => executed,
            failure = turn.lost() => Err(Trouble::Replace(failure)),
        };
        let failure = match executed {
            Ok(answer) => return Ok((turn, answer)),
            Err(Trouble::Broken(what)) => {
                tracing::warn!(worker = %turn.plan().decode.name, what, "a worker broke the protocol");
                return Err(ApiError::worker_died());
            }
            Err(Trouble::Replace(failure)) => failure,
        };
        tracing::info!(worker = %turn.plan().decode.name, ?failure, "a turn is placed anew");
        if left == 0 {
            return Err(match failure {
                Failure::Busy => ApiError::busy(),
                _ => ApiError::worker_died(),
            });
        }
        left -= 1;
        turn = turn.failed(failure).await?;
    }
}

fn respond<B: Backend>(
    api: Api,
    turn: B::Turn,
    answer: Answer,
    after: Option<After>,
    mut meter: Meter,
    local: &Local<B>,
    permit: OwnedSemaphorePermit,
) -> HttpResponse {
    let ok = answer.status.is_success();
    if let Some(report) = report(&answer.headers) {
        turn.reported(report);
    }
    let mut response = HttpResponse::build(answer.status);
    pass_headers(&answer.headers, &mut response);
    decision_headers(turn.plan(), ok, &mut response);
    if let Some(name) = turn.record().and_then(value) {
        response.insert_header((headers::EXPLAIN, name));
    }
    let sse = is_event_stream(&answer.headers);
    match answer.body {
        AnswerBody::Stream(first, rest) => {
            let idle = Duration::from_secs(local.http.idle_timeout_s);
            response.body(Relay::new((first, rest), (api, sse), turn, meter, idle, after, permit))
        }
        AnswerBody::Whole(bytes) => {
            // An error of the worker's own, or an answer without a byte: nothing was served.
            meter.ends("failed", if ok { "empty_answer" } else { "worker_error" });
            turn.broken();
            response.body(bytes)
        }
    }
}

/// What the D says it did. A worker of another kind says nothing.
fn report(headers: &[(HeaderName, HeaderValue)]) -> Option<Report> {
    let (_, value) = headers.iter().find(|(name, _)| name == REPORT_HEADER)?;
    serde_json::from_slice(value.as_bytes()).ok()
}

/// Copies what a client may see of a worker's headers.
pub(super) fn pass_headers(from: &[(HeaderName, HeaderValue)], response: &mut HttpResponseBuilder) {
    let connection = from.iter().filter(|(name, _)| name == header::CONNECTION).map(|(_, v)| v);
    let connection = headers::connection_tokens(connection);
    for (name, value) in from.iter().filter(|(name, _)| headers::passes_back(name, &connection)) {
        response.append_header((name.clone(), value.clone()));
    }
}

/// How the turn was served, or that the worker refused it.
fn decision_headers(plan: &DispatchPlan, ok: bool, response: &mut HttpResponseBuilder) {
    let (mode, reason) =
        if ok { (plan.mode.as_str(), plan.rung.as_str()) } else { ("failed", "worker_error") };
    response.insert_header((headers::MODE, HeaderValue::from_static(mode)));
    response.insert_header((headers::REASON, HeaderValue::from_static(reason)));
    let texts = [(headers::WORKER, &*plan.decode.name), (headers::SESSION, plan.session.public())];
    for (name, text) in texts {
        if let Some(value) = value(text) {
            response.insert_header((name, value));
        }
    }
    if plan.replaced > 0 {
        response.insert_header((headers::REPLACED, plan.replaced));
    }
}

fn is_event_stream(headers: &[(HeaderName, HeaderValue)]) -> bool {
    let value = headers.iter().find(|(name, _)| name == header::CONTENT_TYPE).map(|(_, v)| v);
    value.and_then(|v| v.to_str().ok()).is_some_and(|v| v.trim_start().starts_with("text/event-stream"))
}
