//! What a single cold worker answers: the yardstick for every mode.

use crate::prompt::{Api, BLOCK_BYTES};

use super::super::error::NodeError;
use super::model::{Model, Sampler};
use super::request::Job;

/// The text a cold worker with the default KV size answers to this request body.
///
/// # Errors
/// As a worker: the body is not such a request, or asks for another model than `model`.
pub fn reference_text(model: &str, api: Api, body: &[u8]) -> Result<String, NodeError> {
    reference_text_with(Model::default(), model, api, body)
}

/// As [`reference_text`], for workers that store another number of KV bytes per token.
///
/// # Errors
/// As [`reference_text`].
pub fn reference_text_with(kv: Model, model: &str, api: Api, body: &[u8]) -> Result<String, NodeError> {
    let job = Job::read(api, body, model)?;
    if let Some(script) = &job.script {
        return Ok(script.text().to_owned());
    }
    let held = kv.blocks(None, &job.text);
    let tail = &job.text[held.len() * BLOCK_BYTES..];
    let mut sampler = Sampler::new(held.iter().map(|kv| &**kv), tail);
    let text = (1..=job.output).flat_map(|i| sampler.token(i == job.output)).map(char::from).collect();
    Ok(text)
}
