package telemetry

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/config"
)

// stoppedReader takes nothing until it is let go on.
type stoppedReader struct {
	goOn  chan struct{}
	asked atomic.Bool // to take a line

	mu   sync.Mutex
	text bytes.Buffer
}

func (r *stoppedReader) Write(p []byte) (int, error) {
	r.asked.Store(true)
	<-r.goOn
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *stoppedReader) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

// TestALogThatIsNotReadHoldsNothingUp: a line is dropped and not waited for, the lines before it come in order and whole when the reader
// goes on, and one says how many are missing.
func TestALogThatIsNotReadHoldsNothingUp(t *testing.T) {
	t.Parallel()
	reader := &stoppedReader{goOn: make(chan struct{})}
	log, end := StartLog(reader, slog.LevelInfo, config.LogText)
	const lines, bytes = 2000, 1000
	for i := range lines {
		log.Info("line", "number", i, "text", strings.Repeat("x", bytes))
		for i == 0 && !reader.asked.Load() { // it would take the first line later, and make room between lines that are dropped
			time.Sleep(time.Millisecond)
		}
	}
	began := time.Now()
	end() // waits in vain
	if took := time.Since(began); took < logEndMax/2 || took > 30*logEndMax {
		t.Errorf("the end took %v", took)
	}
	close(reader.goOn)
	for range 30 {
		if end(); strings.Contains(reader.String(), "level=WARN") { // it waits for a second
			break
		}
	}
	text := strings.Split(strings.TrimSpace(reader.String()), "\n")
	kept := len(text) - 1
	if kept < logQueueBytes/(bytes+100) || kept > logQueueBytes/bytes+1 {
		t.Errorf("%d lines were kept of %d bytes each", kept, bytes)
	}
	for i, line := range text[:kept] {
		if !strings.Contains(line, fmt.Sprintf("msg=line number=%d text=", i)) || !strings.HasSuffix(line, strings.Repeat("x", bytes)) {
			t.Fatalf("line %d is %.120s", i, line)
		}
	}
	if last := text[kept]; !strings.Contains(last, "level=WARN") || !strings.HasSuffix(last, fmt.Sprintf(" lines=%d", lines-kept)) {
		t.Errorf("%d lines were kept; the last line is %s", kept, last)
	}
}

// TestTheLastLinesOfALogAreWritten: the end waits for them.
func TestTheLastLinesOfALogAreWritten(t *testing.T) {
	t.Parallel()
	reader := &stoppedReader{goOn: make(chan struct{})}
	close(reader.goOn)
	log, end := StartLog(reader, slog.LevelWarn, config.LogJSON)
	log.Info("no line")
	for i := range 100 {
		log.Warn("line", "number", i)
	}
	end()
	if n := strings.Count(reader.String(), "\n"); n != 100 || !strings.Contains(reader.String(), `"number":99}`) {
		t.Errorf("%d lines: %s", n, reader.String())
	}
	log.Warn("too late")
	if strings.Contains(reader.String(), "late") {
		t.Error("a line was written after the end")
	}
}
