//! One request from its first byte to the head of its answer.

use std::time::Duration;

use actix_web::http::header::{self, HeaderName, HeaderValue};
use actix_web::http::{ConnectionType, Version};
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder};

use super::access::Caller;
use super::backend::{Backend, Incoming, Turn};
use super::body;
use super::errors::ApiError;
use super::headers::{self, value};
use super::hint;
use super::meter::Meter;
use super::relay::{After, How, Relay};
use super::resume::{self, Resume};
use super::{Local, Passed};
use crate::actors::api::{DispatchPlan, Failure};
use crate::actors::gate::Permit;
use crate::engines::Engine;
use crate::engines::answer::{Answer, AnswerBody, Trouble};
use crate::engines::client::{Client, Request};
use crate::prompt::Api;
use crate::translate::{self, Translator};
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
    let mut meter = Meter::begin(&local.front.tally);
    let served = async {
        let caller = local.front.access.caller(req.headers())?;
        // Before the body is read: bodies are what an overload would fill the memory with.
        let permit = local.backend.gate().enter().ok_or_else(ApiError::overloaded)?;
        let served = answer(api, &req, payload, &local, &caller, permit).await?;
        Ok((served, caller))
    };
    match served.await {
        Ok((served, caller)) => {
            let mut response = respond(api, served, meter, &local, caller);
            if req.version() == Version::HTTP_10 {
                // It knows no chunks: the body ends with the connection.
                response.head_mut().no_chunking(true);
                response.head_mut().set_connection_type(ConnectionType::Close);
            }
            Ok(response)
        }
        Err(error) => {
            meter.fails(&error);
            Err(error.spoken(api.into()))
        }
    }
}

/// A turn whose answer has begun.
struct Served<T> {
    turn: T,
    answer: Answer,
    /// What turns the answer back into the client's API.
    back: Option<Translator>,
    /// Types of the tools that the request lost on its way to the worker.
    dropped: String,
    /// What is left to do when it has ended.
    after: Option<After>,
    /// How it goes on should its worker break off.
    resume: Option<Resume>,
    /// Whether the client is Codex, which gives hints back.
    codex: bool,
}

async fn answer<B: Backend>(
    api: Api,
    req: &HttpRequest,
    payload: Payload,
    local: &Local<B>,
    caller: &Caller,
    permit: Permit,
) -> Result<Served<B::Turn>, ApiError> {
    let (http, path) = (local.front.http(), path_of(api));
    let body =
        body::read(req, payload, http.body_limit_mib, Duration::from_secs(http.request_timeout_s)).await?;
    let explain = http.explain && req.headers().get(headers::EXPLAIN).is_some_and(|v| v.as_bytes() == b"1");
    let Passed { body: passed, back, dropped } = local.passed(api, body.clone())?;
    let sent = back.is_some().then_some(&passed);
    let codex = headers::is_codex(req.headers());
    let hint =
        req.headers().get(hint::HEADER).filter(|_| codex).map(|token| local.hints.hint(token.as_bytes()));
    let incoming = Incoming { path, headers: req.headers(), body: &body, sent, hint, explain };
    let path = if sent.is_some() { path_of(Api::Chat).to_owned() } else { with_query(path, req) };
    let mut request = Request::post(path, passed.clone());
    let keyless = caller.by_key || local.client.shows_key();
    headers::forward(req.headers(), keyless, &mut request);
    if sent.is_some() && !keyless {
        headers::as_bearer(req.headers(), &mut request);
    }
    let answered = async {
        let turn = local.backend.place(incoming, permit).await?;
        let at = (&local.engine, &local.client);
        let (turn, answer) = run(at, turn, &request).await?;
        let resume = (http.resume_streams && back.is_none() && resume::is_determined(api, &passed))
            .then(|| Resume::new(api, at, &request, &turn.plan().request_id))
            .filter(|_| local.engine.capabilities().continues);
        let after = (local.engine.hands_back() && !turn.plan().sync.is_empty()).then(|| After {
            engine: local.engine.clone(),
            client: local.client.clone(),
            request: request.clone(),
        });
        Ok(Served { turn, answer, back, dropped, after, resume, codex })
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
pub(super) async fn run<T: Turn>(
    (engine, client): (&Engine, &Client),
    mut turn: T,
    request: &Request,
) -> Result<(T, Answer), ApiError> {
    let mut left = REPLACEMENTS;
    loop {
        let executed = tokio::select! {
            biased;
            executed = engine.execute(client, turn.plan(), request, || turn.prefill_done()) => executed,
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
    Served { turn, answer, back, dropped, after, resume, codex }: Served<B::Turn>,
    mut meter: Meter,
    local: &Local<B>,
    caller: Caller,
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
    if let Some(dropped) = value(&dropped).filter(|types| !types.is_empty()) {
        response.insert_header((headers::DROPPED, dropped));
    }
    let plan = turn.plan();
    if codex && ok && !plan.one_shot {
        response.insert_header((hint::HEADER, local.hints.token(&plan.session, &plan.decode.name)));
    }
    let sse = is_event_stream(&answer.headers);
    match answer.body {
        AnswerBody::Stream(first, rest) => {
            let http = local.front.http();
            let idle = Duration::from_secs(http.idle_timeout_s);
            let how = How { api, sse, back, idle, after, resume: resume.filter(|_| sse && ok) };
            response.body(Relay::new((first, rest), how, turn, meter, caller))
        }
        AnswerBody::Whole(bytes) => {
            // An error of the worker's own, or an answer without a byte: nothing was served.
            meter.ends("failed", if ok { "empty_answer" } else { "worker_error" });
            if answer.status.is_client_error() {
                drop(turn)
            } else {
                turn.broken(!ok)
            }
            let told = back.and_then(|_| translate::error(api, answer.status.as_u16(), &bytes));
            match told {
                Some(told) => response.content_type("application/json").body(told),
                None => response.body(bytes),
            }
        }
    }
}

/// What the D says it did. A worker of another kind says nothing.
pub(super) fn report(headers: &[(HeaderName, HeaderValue)]) -> Option<Report> {
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

pub(super) fn is_event_stream(headers: &[(HeaderName, HeaderValue)]) -> bool {
    let value = headers.iter().find(|(name, _)| name == header::CONTENT_TYPE).map(|(_, v)| v);
    value.and_then(|v| v.to_str().ok()).is_some_and(|v| v.trim_start().starts_with("text/event-stream"))
}
