package client

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Range is a range of keys. The zero Range is all keys.
type Range struct {
	// Start is the first key, End the first key after the range. Empty means unbounded.
	Start, End []byte
	// Prefix is an alternative to Start and End: all keys that begin with it.
	Prefix []byte
}

// Prefix is the range of the keys that begin with p.
func Prefix(p []byte) Range { return Range{Prefix: p} }

// Between is the range of the keys k with start <= k < end.
func Between(start, end []byte) Range { return Range{Start: start, End: end} }

func (r Range) wire() *kvpb.KeyRange {
	return &kvpb.KeyRange{Start: r.Start, End: r.End, Prefix: r.Prefix}
}

// ScanOptions change a scan. The zero ScanOptions scans forward, without limit, at the newest
// epoch.
type ScanOptions struct {
	// Reverse scans from the last key to the first.
	Reverse bool
	// Limit ends the scan after so many entries; 0 means no limit.
	Limit uint64
	// KeysOnly leaves the values out.
	KeysOnly bool
	// At reads at this epoch; 0 means the newest. Not with ResumeToken, which has its own.
	At Epoch
	// AtTime reads the state at this time of the past, by the server's clock, instead.
	AtTime time.Time
	// PageBytes is about how much the server sends at once; 0 leaves it to the server.
	PageBytes uint32
	// Tokens makes the page that Limit ended return a token, to continue later. The server takes a
	// snapshot lease for it, which lasts as long as its option --snapshot-lease-ttl says.
	Tokens bool
	// ResumeToken continues after the page that returned it.
	ResumeToken []byte
	// ResumeAtNewest continues after ResumeToken's page at the newest epoch instead of the token's
	// own.
	ResumeAtNewest bool
}

// Entry is a key with its value.
type Entry struct {
	Key, Value []byte
	// Epoch wrote the value.
	Epoch Epoch
	// ExpiresAt is when the key expires; zero if it does not.
	ExpiresAt time.Time
	// Lease is the lease that the key is attached to; zero for none.
	Lease uint64
}

// Page is a part of a scan.
type Page struct {
	Entries []Entry
	// Count of entries that the page covers: len(Entries), unless entries are only counted.
	Count uint64
	// ReadEpoch is the epoch at which the whole scan reads.
	ReadEpoch Epoch
	// ResumeToken continues after this page while the server keeps the epoch readable, and later
	// with ResumeAtNewest. It is empty at the end of the range, and in the page that Limit ended
	// unless ScanOptions.Tokens is set.
	ResumeToken []byte
}

// Scan iterates over the entries of r, all of them read at one epoch. After a lost connection it
// continues from the last page, at the same epoch. An error ends the iteration and comes with a
// zero Entry.
func (c *Client) Scan(ctx context.Context, r Range, o ScanOptions) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for page, err := range c.Pages(ctx, r, o) {
			if err != nil {
				yield(Entry{}, err)
				return
			}
			for _, e := range page.Entries {
				if !yield(e, nil) {
					return
				}
			}
		}
	}
}

// Pages is Scan by pages, with the epoch and the resume token of each.
func (c *Client) Pages(ctx context.Context, r Range, o ScanOptions) iter.Seq2[Page, error] {
	return c.pages(ctx, func() *kvpb.ScanRequest { return scanRequest(r, o) })
}

// Count counts the entries of r on the server and returns their number and the epoch at which they
// were counted.
func (c *Client) Count(ctx context.Context, r Range, o ScanOptions) (uint64, Epoch, error) {
	countOnly := func() *kvpb.ScanRequest {
		request := scanRequest(r, o)
		request.CountOnly = true
		return request
	}
	var count uint64
	var at Epoch
	for page, err := range c.pages(ctx, countOnly) {
		if err != nil {
			return 0, 0, err
		}
		count, at = count+page.Count, page.ReadEpoch
	}
	return count, at, nil
}

func scanRequest(r Range, o ScanOptions) *kvpb.ScanRequest {
	tokens := kvpb.ResumeTokens_RESUME_TOKENS_INNER // to continue after a lost connection
	if o.Tokens {
		tokens = kvpb.ResumeTokens_RESUME_TOKENS_ALL
	}
	var atTime uint64
	if !o.AtTime.IsZero() {
		atTime = wireTime(o.AtTime)
	}
	return &kvpb.ScanRequest{
		SnapshotTimeUs: atTime,
		Range:          r.wire(), Reverse: o.Reverse, Limit: o.Limit, KeysOnly: o.KeysOnly, PageBytes: o.PageBytes,
		SnapshotEpoch: uint64(o.At), ResumeToken: o.ResumeToken, Tokens: tokens, ResumeAtNewest: o.ResumeAtNewest,
	}
}

// pages streams the answer to a request and resumes it when the connection breaks. Only attempts
// without progress count toward the bound, so that a long scan survives any number of single
// failures. The request advances while it is served, so each iteration starts with a new one.
func (c *Client) pages(ctx context.Context, newRequest func() *kvpb.ScanRequest) iter.Seq2[Page, error] {
	return func(yield func(Page, error) bool) {
		request := newRequest()
		for attempt := 1; ; attempt++ {
			progress, err := c.streamPages(ctx, request, yield)
			if err == nil {
				return
			}
			if progress {
				attempt = 1
			}
			e := newError(err)
			if attempt >= c.retry.Attempts || !mayRepeat(e, safe) || !c.retry.pause(ctx, attempt, e) {
				yield(Page{}, e)
				return
			}
		}
	}
}

// streamPages runs one stream, and advances request to what is left. It returns nil when the scan
// has ended or the consumer has stopped.
func (c *Client) streamPages(
	ctx context.Context, request *kvpb.ScanRequest, yield func(Page, error) bool,
) (progress bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	// If the consumer stops early, this ends the stream; the server counts that as the end of the
	// scan and not as an error.
	defer cancel()
	stream, err := c.kv.Scan(ctx, request)
	if err != nil {
		return false, err
	}
	limited := request.GetLimit() > 0
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return progress, nil
		}
		if err != nil {
			return progress, err
		}
		progress = true
		if !yield(pageOf(response), nil) {
			if len(response.GetResumeToken()) == 0 {
				_, _ = stream.Recv() // this was the last page: let the stream end with its status
			}
			return true, nil
		}
		if limited {
			request.Limit -= min(request.GetLimit(), response.GetCount())
		}
		if len(response.GetResumeToken()) == 0 || limited && request.GetLimit() == 0 {
			_, _ = stream.Recv() // let the stream end with its status; all entries have arrived, so no error matters
			return true, nil
		}
		request.ResumeToken, request.SnapshotEpoch, request.SnapshotTimeUs, request.ResumeAtNewest = response.GetResumeToken(), 0, 0, false
	}
}

func pageOf(r *kvpb.ScanResponse) Page {
	page := Page{Count: r.GetCount(), ReadEpoch: Epoch(r.GetReadEpoch()), ResumeToken: r.GetResumeToken()}
	page.Entries = entriesOf(r.GetEntries())
	return page
}
