//! Content of a message: a string or parts, text or media, calls or results.

use xxhash_rust::xxh3::xxh3_128;

use super::canonical::{CALL, MEDIA, MEDIA_BYTES, REASON, RESULT, Writer};
use super::error::BadBody;
use super::ids::call_id;
use super::json::{Cursor, MAX_DEPTH, Text};
use super::neutral;

type Result<T> = std::result::Result<T, BadBody>;

/// Writes a content in any of its forms. Every recursion below passes here, so its depth is counted here.
///
/// # Errors
/// Malformed JSON, or nested deeper than [`MAX_DEPTH`].
pub(crate) fn content(w: &mut Writer, cursor: &mut Cursor<'_>) -> Result<()> {
    if w.depth > MAX_DEPTH {
        return cursor.bad();
    }
    w.depth += 1;
    let written = content_here(w, cursor);
    w.depth -= 1;
    written
}

fn content_here(w: &mut Writer, cursor: &mut Cursor<'_>) -> Result<()> {
    match cursor.peek() {
        Some(b'"') => w.text(cursor),
        Some(b'[') => {
            let mut first = true;
            cursor.array()?;
            while cursor.element(&mut first)? {
                match cursor.peek() {
                    Some(b'{') => part(w, cursor)?,
                    _ => content(w, cursor)?,
                }
            }
            Ok(())
        }
        Some(b'{') => part(w, cursor),
        Some(b'n') => cursor.scalar().map(drop),
        _ => {
            w.part();
            neutral::write(cursor, &mut w.buf, &[])
        }
    }
}

/// What kind of part `type` names.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Text,
    Reasoning,
    Call,
    Result,
    Media,
    Other,
}

fn part_kind(kind: &[u8]) -> Part {
    match kind {
        b"text" | b"input_text" | b"output_text" | b"summary_text" | b"refusal" => Part::Text,
        b"thinking" | b"reasoning" | b"reasoning_text" | b"redacted_thinking" => Part::Reasoning,
        b"tool_use" => Part::Call,
        b"tool_result" => Part::Result,
        b"image_url" | b"image" | b"input_image" | b"input_audio" | b"audio_url" | b"video_url"
        | b"document" | b"file" | b"input_file" => Part::Media,
        _ => Part::Other,
    }
}

/// The field in which a kind of part keeps what the model sees.
fn field(kind: Part, key: &[u8]) -> bool {
    match kind {
        Part::Text => matches!(key, b"text" | b"refusal"),
        Part::Reasoning => matches!(key, b"thinking" | b"text" | b"reasoning"),
        Part::Call => key == b"input",
        Part::Result => key == b"content",
        Part::Media | Part::Other => false,
    }
}

fn part(w: &mut Writer, cursor: &mut Cursor<'_>) -> Result<()> {
    let start = cursor.at();
    let (mut first, mut kind, mut name) = (true, None, None);
    let mut written = false;
    cursor.object()?;
    while let Some(key) = cursor.key(&mut first)? {
        match &*key {
            b"type" if kind.is_none() => {
                kind = cursor.opt_string()?.map(|t| part_kind(&t.bytes()));
            }
            b"name" => name = cursor.opt_string()?,
            b"id" | b"tool_use_id" | b"call_id" => note_call(w, cursor)?,
            // The common order, type first: the text goes where it belongs in this pass.
            key if !written && kind.is_some_and(|k| k != Part::Call && field(k, key)) => {
                written = true;
                body(w, cursor, kind.unwrap_or(Part::Other), None)?;
            }
            _ => {
                cursor.skip()?;
            }
        }
    }
    if written {
        return Ok(());
    }
    let whole = cursor.since(start);
    match kind {
        Some(Part::Media) => media(w, whole),
        Some(kind) if kind != Part::Other => late(w, whole, kind, name),
        _ => {
            w.part();
            neutral::write(&mut Cursor::new(whole), &mut w.buf, neutral::ITEM)
        }
    }
}

/// A part whose fields came in another order: a second look.
fn late(w: &mut Writer, whole: &[u8], kind: Part, name: Option<Text<'_>>) -> Result<()> {
    let mut cursor = Cursor::new(whole);
    let (mut first, mut found) = (true, None);
    cursor.object()?;
    while let Some(key) = cursor.key(&mut first)? {
        let value = cursor.skip()?;
        if field(kind, &key) {
            found = Some(value);
        }
    }
    match (found, kind) {
        (Some(value), _) => body(w, &mut Cursor::new(value), kind, name),
        (None, Part::Call | Part::Result) => body(w, &mut Cursor::new(b"null"), kind, name),
        (None, _) => Ok(()),
    }
}

fn body(w: &mut Writer, cursor: &mut Cursor<'_>, kind: Part, name: Option<Text<'_>>) -> Result<()> {
    match kind {
        Part::Reasoning => reasoning(w, cursor),
        Part::Result => w.marked(RESULT, true, |w| content(w, cursor)),
        Part::Call => call(w, name, cursor),
        _ => content(w, cursor),
    }
}

/// What the model thought.
pub(crate) fn reasoning(w: &mut Writer, cursor: &mut Cursor<'_>) -> Result<()> {
    w.marked(REASON, false, |w| content(w, cursor))
}

/// A call the model made: its name and arguments, without its id.
pub(crate) fn call(w: &mut Writer, name: Option<Text<'_>>, arguments: &mut Cursor<'_>) -> Result<()> {
    w.buf.push(CALL);
    if let Some(name) = name {
        name.decode_into(&mut w.buf);
    }
    w.buf.push(b'\n');
    match arguments.peek() {
        Some(b'"') => {
            let start = w.buf.len();
            arguments.string_into(&mut w.buf)?;
            one_spelling(&mut w.buf, start);
            Ok(())
        }
        Some(b'{' | b'[') => neutral::write(arguments, &mut w.buf, &[]),
        _ => arguments.skip().map(drop),
    }
}

/// Arguments that are JSON in a string, as the object they are: templates render the object, and clients spell it
/// anew when they give it back.
fn one_spelling(buf: &mut Vec<u8>, start: usize) {
    if buf.get(start) != Some(&b'{') {
        return;
    }
    let text = buf.split_off(start);
    let mut cursor = Cursor::new(&text);
    let whole = neutral::write(&mut cursor, buf, &[]).and_then(|()| cursor.end());
    if whole.is_err() {
        buf.truncate(start);
        buf.extend_from_slice(&text);
    }
}

/// Remembers the id of a call or a result for lineage.
pub(crate) fn note_call(w: &mut Writer, cursor: &mut Cursor<'_>) -> Result<()> {
    if let Some(id) = cursor.opt_string()? {
        w.calls.extend(call_id(&id.bytes()));
    }
    Ok(())
}

/// An image, a file, a sound: a fixed length that depends on all of its content.
fn media(w: &mut Writer, whole: &[u8]) -> Result<()> {
    w.part();
    w.buf.push(MEDIA);
    let start = w.buf.len();
    neutral::write(&mut Cursor::new(whole), &mut w.buf, neutral::ITEM)?;
    let digest = xxh3_128(&w.buf[start..]).to_le_bytes();
    w.buf.truncate(start);
    w.buf.extend(digest.iter().cycle().take(MEDIA_BYTES));
    w.media += 1;
    Ok(())
}
