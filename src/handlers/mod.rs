//! What happens on each event: the table of contents of the business.

mod order_status;
mod reserve_stock;

use sqlx::PgConnection;

use crate::inbox::{Dispatch, Fresh};
use crate::message::{Event, Stop};

/// The handlers of this service.
#[derive(Clone, Copy, Debug)]
pub struct Handlers;

impl Dispatch for Handlers {
    /// Each handler gets all events of its kind at once. Their order among each other does not matter: the outcome
    /// is the same whichever of two events of an order comes first.
    async fn dispatch(&self, conn: &mut PgConnection, fresh: &[Fresh<'_>]) -> Result<(), Stop> {
        let (mut placed, mut changed) = (Vec::new(), Vec::new());
        for fresh in fresh {
            match &fresh.message().event {
                Event::OrderPlaced(order) => placed.push(order),
                Event::OrderStatusChanged(change) => changed.push(change),
            }
        }
        let orders = placed.iter().map(|o| o.order_id).chain(changed.iter().map(|c| c.order_id));
        let cancelled =
            order_status::lock(conn, orders).await.map_err(|error| Stop::from(error).during("order_status"))?;
        let is_probe = fresh.is_empty();
        if !placed.is_empty() || is_probe {
            let reserved = reserve_stock::reserve(conn, &placed, &cancelled).await;
            reserved.map_err(|error| Stop::from(error).during("reserve_stock"))?;
        }
        if !changed.is_empty() || is_probe {
            order_status::change(conn, &changed).await.map_err(|error| Stop::from(error).during("order_status"))?;
        }
        Ok(())
    }
}
