//! A request of any API that generates: a leg of a planned turn, or a plain request.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{Response, StatusCode};
use serde_json::json;

use crate::core::types::Mode;
use crate::prompt::Api;
use crate::wire::info::KvRole;
use crate::wire::plan::{Plan, REPORT_HEADER, Report};

use super::super::builtin::decode::{DecodeLeg, Decoding, Owner};
use super::super::builtin::engine::Entry;
use super::super::builtin::kept::Keep;
use super::super::builtin::request::Job;
use super::super::error::NodeError;
use super::answer::{Names, shape};
use super::{App, Body, full, json as json_response, response, sse};

/// Serves the request as its plan says; the whole turn lives in this future and in the body it returns.
pub async fn generate(
    app: &Arc<App>,
    api: Api,
    body: Bytes,
    plan: Option<Plan>,
) -> Result<Response<Body>, NodeError> {
    let (body, keep) = match api {
        Api::Responses => app.kept.continued(body)?,
        _ => (body, None),
    };
    let job = Job::read(api, &body, &app.info.model)?;
    drop(body);
    match plan {
        Some(Plan::Prefill { request_id, session, push }) => {
            app.role(KvRole::Prefill)?;
            let prompt_tokens = job.prompt_tokens();
            let report = app.engine.prefill(job, &request_id, session, &push).await?;
            let answer = json!({"id": request_id, "object": "kvc.prefill", "report": report,
                "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": prompt_tokens}});
            Ok(with_report(json_response(&answer)?, &report))
        }
        Some(Plan::Restore { request_id, push, blocks, .. }) => {
            app.role(KvRole::PrefillBackupReceiver)?;
            let report = app.engine.restore(&job, &push, blocks).await?;
            let answer = json!({"id": request_id, "object": "kvc.restore", "report": report});
            Ok(with_report(json_response(&answer)?, &report))
        }
        Some(Plan::Decode { request_id, session, mode, lease_epoch, reuse_blocks, pull, sync }) => {
            let entry = entry(app, mode, lease_epoch)?;
            let owner = session.map_or(Owner::OneShot, Owner::Session);
            let reuse_blocks = reuse_blocks as usize;
            decode(app, job, keep, DecodeLeg { request_id, owner, entry, reuse_blocks, pull, sync }).await
        }
        None => {
            let request_id = app.request_id();
            let (owner, entry) = (Owner::Plain, Entry::Forced);
            let leg = DecodeLeg { request_id, owner, entry, reuse_blocks: 0, pull: None, sync: Vec::new() };
            decode(app, job, keep, leg).await
        }
    }
}

/// `POST /v1/messages/count_tokens`.
pub fn count_tokens(app: &App, body: &[u8]) -> Result<Response<Body>, NodeError> {
    let job = Job::read(Api::Messages, body, &app.info.model)?;
    json_response(&json!({"input_tokens": job.prompt_tokens()}))
}

/// A lease is good in the epoch it was granted in; without one only a Fallback may start.
fn entry(app: &App, mode: Mode, lease_epoch: Option<u64>) -> Result<Entry, NodeError> {
    match lease_epoch {
        Some(epoch) if epoch == app.engine.epoch => Ok(Entry::Leased),
        Some(_) => Err(NodeError::plan_mismatch("the lease is from an earlier start of this worker")),
        None if mode == Mode::Fallback => Ok(Entry::Forced),
        None => Err(NodeError::plan_mismatch(format!("mode {mode} needs a lease"))),
    }
}

async fn decode(
    app: &Arc<App>,
    job: Job,
    keep: Option<Keep>,
    leg: DecodeLeg,
) -> Result<Response<Body>, NodeError> {
    app.role(KvRole::Decode)?;
    if leg.entry == Entry::Forced {
        app.takes_new_turns()?;
    }
    let (stream, include_usage) = (job.stream, job.include_usage);
    let names = Names::new(&leg.request_id, &app.info.model, job.begun.as_ref());
    let shape = shape(job.api, names, include_usage, keep);
    let said = job.begun.as_ref().map(|begun| begun.text.clone());
    let mut decoding = app.engine.decode(job, leg).await?;
    let report = decoding.report;
    let answer = if stream {
        response(StatusCode::OK, "text/event-stream", sse::body(shape, decoding, said))
    } else {
        let text = said.unwrap_or_default() + &whole(&mut decoding).await?;
        response(StatusCode::OK, "application/json", full(shape.whole(&text, &decoding)))
    };
    Ok(with_report(answer, &report))
}

async fn whole(decoding: &mut Decoding) -> Result<String, NodeError> {
    let mut text = String::new();
    while let Some(tokens) = decoding.next().await? {
        text += &tokens;
    }
    Ok(text)
}

fn with_report(mut response: Response<Body>, report: &Report) -> Response<Body> {
    // Numbers in JSON are always a valid header value.
    let value = serde_json::to_string(report).ok().and_then(|json| HeaderValue::try_from(json).ok());
    if let Some(value) = value {
        response.headers_mut().insert(HeaderName::from_static(REPORT_HEADER), value);
    }
    response
}
