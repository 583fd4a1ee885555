package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestSlowShowsWhereTheTimeWent: a table of at most 110 columns, however long its cells are, and of 80 for most requests; JSON has
// all parts.
func TestSlowShowsWhereTheTimeWent(t *testing.T) {
	ms := func(n int) *durationpb.Duration { return durationpb.New(time.Duration(n) * time.Millisecond) }
	list := &kvpb.SlowRequestsResponse{Total: 7, Threshold: ms(100), Requests: []*kvpb.SlowRequest{{
		Method: "Transact.DeleteRange", Ended: timestamppb.Now(), Took: ms(2000), Code: "DeadlineExceeded", Peer: "192.168.100.100:65535", KeyPrefix: []byte{0xff},
		Queue: ms(1), Latch: ms(20), Memory: ms(300), Pages: ms(1000), PagesRead: 1234, Sync: ms(79),
	}}}
	var out bytes.Buffer
	a := &app{out: &out, format: formatTable}
	if err := a.printSlow(list); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		if len(line) > 110 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
	if !strings.Contains(out.String(), "pages 1s (1234), rest 600ms ") {
		t.Error(out.String())
	}
	if strings.Contains(out.String(), "TRACE") {
		t.Errorf("traces of none: %s", out.String())
	}
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	list.Requests[0].TraceId = trace
	out.Reset()
	if err := a.printSlow(list); err != nil || !strings.Contains(out.String(), "Transact.DeleteRange  "+trace+"\n") || strings.Count(out.String(), trace) != 1 {
		t.Error(out.String(), err)
	}
	out.Reset()
	a.format = formatJSONL
	if err := a.printSlow(list); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"took_us":2000000`, `"queue":1000`, `"rest":600000`, `"pages_read":1234`, `"trace_id":"` + trace + `"`, `"key_prefix_base64":"/w=="`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %s in %s", want, out.String())
		}
	}
	out.Reset()
	a.format = formatTable
	if err := a.printSlow(&kvpb.SlowRequestsResponse{Total: 3, Threshold: ms(100)}); err != nil || out.String() != "no request took longer than 100ms in the last hour (3 since the start)\n" {
		t.Error(out.String(), err)
	}
}
