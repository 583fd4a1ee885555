package server

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/doctable"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// limitRow is a row of docs/limits.md.
type limitRow struct{ what, limit, beyond string }

// limitRows are the limits of a server with its default options.
func limitRows() []limitRow {
	c := config.Default()
	size := func(n int) string { return config.Size(n).String() }
	option := func(value any, name string) string { return fmt.Sprintf("%v (`--%s`)", value, name) }
	leaves := fmt.Sprintf("one client has at most %d for each that it leaves free", mvcc.ClientTakes)
	years := fmt.Sprintf("%d years", ttlMax/(365*24*time.Hour))
	return []limitRow{
		{"bytes of a key", fmt.Sprintf("1 to %d, a quarter of `--page-size`", int(c.PageSize)/4), "`KEY_EMPTY`, `KEY_TOO_LARGE`"},
		{"bytes of a value", option(c.Limits.ValueSize, "max-value-size"), "`VALUE_TOO_LARGE`"},
		{"keys and values of a write", option(c.Limits.BatchSize, "max-batch-size"), "`BATCH_TOO_LARGE`"},
		{"operations of a request", option(c.Limits.BatchOps, "max-batch-ops") + "; one that sets a deadline counts as 3, and a lease as one more; both lists of an `Execute` together", "`BATCH_TOO_LARGE`"},
		{"a message to the server", size(messageBytesMax(&c)) + ", which follows from the two before", "`BATCH_TOO_LARGE`"},
		{"a message of a `BulkLoad`", size(bulkMessageMax(&c)) + ", 1MiB above `--max-value-size`", "`BATCH_TOO_LARGE`"},
		{"fields of a message, those of messages in it included", fmt.Sprintf("%d times `--max-batch-ops`", fieldsPerOperation), "`BATCH_TOO_LARGE`, or INTERNAL on a stream"},
		{"values that an `InvokeAll` reads, and those that it returns", "each as keys and values of a write; those of one key may be more", "`BATCH_TOO_LARGE`"},
		{
			fmt.Sprintf("an `InvokeAll` of more than %d operations: what it has, what it reads, and what it writes", mvcc.InvokeOperationsFree),
			fmt.Sprintf("each %s (the larger of `--max-batch-size` and %d bytes for each of `--max-batch-ops`), %d bytes for each further operation included; keys count twice",
				size(int(c.InvokeBytes())), config.OperationBytes/3, mvcc.InvokeOperationBytes),
			"`BATCH_TOO_LARGE`",
		},
		{"a transaction in one request (`Execute`) of as many operations", "the same, for what it reads and writes together; not if it only writes", "`BATCH_TOO_LARGE`"},
		{"what an `Execute` returns", fmt.Sprintf("as keys and values of a write, %d bytes for each entry of a scan included", entryMemory), "`BATCH_TOO_LARGE`"},
		{"a message to a client of gRPC", "4MiB unless the client is told otherwise; `client` of this repository accepts more, and reads larger values with `GetStream`", "RESOURCE_EXHAUSTED, raised by the client"},
		{"a message of `GetStream`", size(getStreamChunkBytes) + " of the value", "the value is sent in several"},
		{"keys and values of a `BatchGet`", size(batchGetBytesMax), "further keys are `unread`; at least one is read"},
		{"a page of `Scan`", fmt.Sprintf("%s, or `page_bytes` up to %s; an entry counts as %d bytes at least", size(scanPageBytesDefault), size(scanPageBytesMax), scanEntryBytes), "further pages; each has at least one entry, however large"},
		{"an answer of `History` or `Diff`", fmt.Sprintf("%s and %d entries", size(historyBytesMax), historyCountMax), "a token for the next part"},
		{"a response of a watch", size(watchResponseBytes) + fmt.Sprintf(" and %d events; one event may be larger", watchEventsMax), "further responses"},
		{"the value in a failed precondition", size(mvcc.CurrentValueBytesMax), "`value_size` instead of `value`"},
		{"the answer kept with a request id", "1KiB", "`result_dropped`"},
		{"metadata of a request", size(headerBytesMax) + ", 32 bytes for each field included", "`INVALID_REQUEST`"},
		{"metadata of an answer", "below 8KiB, which clients in other languages accept", ""},
		{"bytes of a transaction", "as `--max-batch-size` (`--max-txn-size`)", "`TXN_TOO_LARGE`"},
		{"open transactions", option(c.Limits.Transactions, "max-transactions") + "; " + leaves, "`TOO_MANY_TXNS`"},
		{"connections", option(c.Limits.Connections, "max-connections") + "; " + leaves, "`TOO_MANY_SESSIONS`"},
		{"streams of a connection", option(c.Limits.Streams, "max-streams"), "the client waits, or `TOO_MANY_SESSIONS`"},
		{"streams of all connections together", "as many as `--memory` carries, beside " + fmt.Sprintf("%d of each connection; %s", config.StreamsOwn, leaves), "`TOO_MANY_SESSIONS`"},
		{"verifications, walks by prefix, and lists of backups in targets, that work or wait", fmt.Sprintf("%d of each kind, of which one works; one client leaves as many places free as it has", inspectionsMax), "`TOO_MANY_SESSIONS`"},
		{"open scans", "a quarter of `--max-inflight-requests`; " + leaves, "`OVERLOADED`"},
		{"requests at once", option(c.Limits.InflightRequests, "max-inflight-requests"), "`OVERLOADED`"},
		{"bytes of requests and answers at once", "a quarter of `--memory` (`--max-inflight-bytes`)", "`OVERLOADED`"},
		{"watches", option(c.Feed.Watches, "max-watches") + ", ranges counted; one client leaves as many free as it has", "`TOO_MANY_WATCHES`"},
		{"watches of a stream", option(c.Feed.WatchesPerStream, "max-watches-per-stream"), "`TOO_MANY_WATCHES`"},
		{"ranges of a watch", fmt.Sprint(watchRangesMax), "`INVALID_REQUEST`"},
		{"leases", option(c.Limits.Leases, "max-leases"), "`TOO_MANY_LEASES`"},
		{
			"requests for leases, locks and holds that are executed at once",
			fmt.Sprintf("%d, a quarter of `--max-inflight-requests`, and 16 at least; %s", leaseSessionsMax(c.Limits.InflightRequests), leaves),
			"`TOO_MANY_SESSIONS`",
		},
		{"keys of a lease", fmt.Sprint(lease.KeysMax), "`TOO_MANY_LEASE_KEYS`"},
		{"time to live of a lease", fmt.Sprintf("%v to %d years", lease.TTLMin, lease.TTLMax/(365*24*time.Hour)), "`INVALID_TTL`"},
		{"time to live of a key", "1s to " + years, "`INVALID_TTL`"},
		{"holds of history", fmt.Sprintf("%d, for %d days at most", mvcc.HoldsMax, mvcc.HoldTimeMax/(24*time.Hour)), "`TOO_MANY_HOLDS`"},
	}
}

// TestLimitTableIsThatOfTheCode keeps docs/limits.md equal to the constants and defaults.
func TestLimitTableIsThatOfTheCode(t *testing.T) {
	var b strings.Builder
	b.WriteString(doctable.Head("what", "limit", "beyond it"))
	for _, r := range limitRows() {
		b.WriteString(doctable.Row(r.what, r.limit, r.beyond))
	}
	doctable.Check(t, "../../docs/limits.md", "limits", b.String())
}

// TestRightsTableIsThatOfTheCode keeps docs/security.md equal to rpcTable.
func TestRightsTableIsThatOfTheCode(t *testing.T) {
	var b strings.Builder
	b.WriteString(doctable.Head("method", "administrative action", "needs"))
	for i := range rpcTable {
		row := &rpcTable[i]
		needs := row.needs
		if row.open && needs == "" {
			needs = "nothing: open to every client"
		}
		b.WriteString(doctable.Row("`"+strings.TrimPrefix(row.method, "/")+"`", strings.Join(row.actions.Names(), ", "), needs))
	}
	doctable.Check(t, "../../docs/security.md", "rights", b.String())
}
