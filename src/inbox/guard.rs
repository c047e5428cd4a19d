//! The guard: who inserts an event's row may run its handlers.

use std::collections::HashSet;

use sqlx::PgConnection;

use crate::message::Message;

/// The right to run the handlers of a message, in the transaction that claimed it. Only the guard gives it.
#[derive(Debug)]
pub struct Fresh<'m>(&'m Message);

impl<'m> Fresh<'m> {
    /// The message that was claimed.
    pub fn message(&self) -> &'m Message {
        self.0
    }
}

/// The guard's answer about one message.
#[derive(Debug)]
pub(super) enum Claim<'m> {
    /// Its row went in just now.
    Fresh(Fresh<'m>),
    /// Its row was there, or a copy earlier in the batch has put it there.
    Duplicate,
}

/// Claims every event of the batch in one statement; one answer a message, in their order.
///
/// A row that another transaction is about to insert is waited for: its end decides.
pub(super) async fn claim<'m>(conn: &mut PgConnection, batch: &[&'m Message]) -> sqlx::Result<Vec<Claim<'m>>> {
    // Sorted: two workers that claim the same events in opposite order deadlock every time.
    let mut ids: Vec<_> = batch.iter().map(|message| message.id.as_uuid()).collect();
    ids.sort_unstable();
    let inserted = sqlx::query_scalar!(
        "insert into processed_event (event_id) select unnest($1::uuid[]) on conflict do nothing returning event_id",
        &ids
    )
    .fetch_all(conn)
    .await?;
    let mut inserted: HashSet<_> = inserted.into_iter().collect();
    Ok(batch
        .iter()
        .map(|message| match inserted.remove(&message.id.as_uuid()) {
            true => Claim::Fresh(Fresh(message)),
            false => Claim::Duplicate,
        })
        .collect())
}
