package clienttest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Get implements kvpb.KVServiceServer.
func (s *Server) Get(_ context.Context, r *kvpb.GetRequest) (*kvpb.GetResponse, error) {
	if err := s.enter("Get"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at, err := s.readEpochLocked(r.GetSnapshotEpoch())
	if err != nil {
		return nil, err
	}
	response := &kvpb.GetResponse{ReadEpoch: at}
	if v := s.newestLocked(r.GetKey(), at); v != nil {
		response.Found, response.Value, response.Epoch = true, v.value, v.epoch
	}
	return response, checkKey(r.GetKey())
}

// BatchGet implements kvpb.KVServiceServer.
func (s *Server) BatchGet(_ context.Context, r *kvpb.BatchGetRequest) (*kvpb.BatchGetResponse, error) {
	if err := s.enter("BatchGet"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at, err := s.readEpochLocked(r.GetSnapshotEpoch())
	if err != nil {
		return nil, err
	}
	response := &kvpb.BatchGetResponse{ReadEpoch: at}
	for _, key := range r.GetKeys() {
		result := &kvpb.BatchGetResult{}
		if v := s.newestLocked(key, at); v != nil {
			result.Found, result.Value, result.Epoch = true, v.value, v.epoch
		}
		response.Results = append(response.Results, result)
	}
	return response, nil
}

// Put implements kvpb.KVServiceServer.
func (s *Server) Put(_ context.Context, r *kvpb.PutRequest) (*kvpb.PutResponse, error) {
	epoch, err := s.write("Put", r.GetRequestId(), r.GetPreconditions(), []*kvpb.Mutation{
		{Kind: kvpb.Mutation_KIND_PUT, Key: r.GetKey(), Value: r.GetValue()},
	})
	return &kvpb.PutResponse{Epoch: epoch}, err
}

// Delete implements kvpb.KVServiceServer.
func (s *Server) Delete(_ context.Context, r *kvpb.DeleteRequest) (*kvpb.DeleteResponse, error) {
	epoch, err := s.write("Delete", r.GetRequestId(), r.GetPreconditions(), []*kvpb.Mutation{
		{Kind: kvpb.Mutation_KIND_DELETE, Key: r.GetKey()},
	})
	return &kvpb.DeleteResponse{Epoch: epoch}, err
}

// BatchWrite implements kvpb.KVServiceServer.
func (s *Server) BatchWrite(_ context.Context, r *kvpb.BatchWriteRequest) (*kvpb.BatchWriteResponse, error) {
	epoch, err := s.write("BatchWrite", r.GetRequestId(), r.GetPreconditions(), r.GetMutations())
	return &kvpb.BatchWriteResponse{Epoch: epoch}, err
}

// DeleteRange implements kvpb.KVServiceServer.
func (s *Server) DeleteRange(_ context.Context, r *kvpb.DeleteRangeRequest) (*kvpb.DeleteRangeResponse, error) {
	if err := s.enter("DeleteRange"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkPreconditionsLocked(r.GetPreconditions()); err != nil {
		return nil, err
	}
	keys := s.keysLocked(r.GetRange(), 0)
	more := r.GetLimit() > 0 && uint64(len(keys)) > r.GetLimit()
	if more {
		keys = keys[:r.GetLimit()]
	}
	if len(keys) == 0 {
		return &kvpb.DeleteRangeResponse{}, nil
	}
	s.epoch++
	for _, key := range keys {
		s.installLocked(key, version{epoch: s.epoch, deleted: true})
	}
	return &kvpb.DeleteRangeResponse{Epoch: s.epoch, Deleted: uint64(len(keys)), More: more}, nil
}

// Status implements kvpb.AdminServiceServer.
func (s *Server) Status(context.Context, *kvpb.StatusRequest) (*kvpb.StatusResponse, error) {
	if err := s.enter("Status"); err != nil {
		return nil, err
	}
	return s.status(), nil
}

// Scan implements kvpb.KVServiceServer. A resume token is the epoch and the last key.
func (s *Server) Scan(r *kvpb.ScanRequest, stream grpc.ServerStreamingServer[kvpb.ScanResponse]) error {
	if err := s.enter("Scan"); err != nil {
		return err
	}
	pages, err := s.scanPages(r)
	if err != nil {
		return err
	}
	s.mu.Lock()
	cut := s.cutScan
	s.mu.Unlock()
	for i, page := range pages {
		if cut > 0 && i == cut {
			return status.Error(codes.Unavailable, "connection cut by the test")
		}
		if err := stream.Send(page); err != nil {
			return err
		}
	}
	return nil
}

// scanPages makes all pages at once; there is at least one.
func (s *Server) scanPages(r *kvpb.ScanRequest) ([]*kvpb.ScanResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, keys, err := s.scanKeysLocked(r)
	if err != nil {
		return nil, err
	}
	limited := r.GetLimit() > 0 && uint64(len(keys)) > r.GetLimit()
	if limited {
		keys = keys[:r.GetLimit()]
	}
	budget := int(r.GetPageBytes())
	if budget == 0 {
		budget = pageBytes
	}
	var pages []*kvpb.ScanResponse
	for {
		page := &kvpb.ScanResponse{ReadEpoch: at}
		for size := 0; len(keys) > 0 && (page.GetCount() == 0 || size < budget); keys = keys[1:] {
			v := s.newestLocked(keys[0], at)
			entry := &kvpb.Entry{Key: keys[0], Epoch: v.epoch}
			if !r.GetKeysOnly() {
				entry.Value = v.value
			}
			if !r.GetCountOnly() {
				page.Entries = append(page.Entries, entry)
			}
			page.Count++
			size += len(entry.GetKey()) + len(entry.GetValue())
			if r.GetTokens() != kvpb.ResumeTokens_RESUME_TOKENS_UNSPECIFIED {
				page.ResumeToken = append(binary.BigEndian.AppendUint64(nil, at), keys[0]...)
			}
		}
		pages = append(pages, page)
		if len(keys) == 0 {
			if !limited || r.GetTokens() != kvpb.ResumeTokens_RESUME_TOKENS_ALL {
				page.ResumeToken = nil
			}
			return pages, nil
		}
	}
}

// scanKeysLocked lists the remaining keys of a scan, in its order.
func (s *Server) scanKeysLocked(r *kvpb.ScanRequest) (at uint64, keys [][]byte, err error) {
	if len(r.GetRange().GetPrefix()) > 0 && len(r.GetRange().GetStart())+len(r.GetRange().GetEnd()) > 0 {
		return 0, nil, NewError(codes.InvalidArgument, kvpb.ErrorReason_ERROR_REASON_INVALID_RANGE,
			"a range has either a prefix or bounds")
	}
	at, err = s.readEpochLocked(r.GetSnapshotEpoch())
	if err != nil {
		return 0, nil, err
	}
	token := r.GetResumeToken()
	if len(token) > 0 {
		if len(token) < 8 {
			return 0, nil, NewError(codes.InvalidArgument, kvpb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN, "bad resume token")
		}
		if !r.GetResumeAtNewest() {
			at = binary.BigEndian.Uint64(token)
		}
	}
	keys = s.keysLocked(r.GetRange(), at)
	if r.GetReverse() {
		slices.Reverse(keys)
	}
	if len(token) > 0 {
		last := token[8:]
		keys = slices.DeleteFunc(keys, func(key []byte) bool {
			c := bytes.Compare(key, last)
			return c == 0 || (c > 0) == r.GetReverse()
		})
	}
	return at, keys, nil
}

// BulkLoad implements kvpb.KVServiceServer. A fault ends the stream when its commit arrives.
func (s *Server) BulkLoad(stream grpc.ClientStreamingServer[kvpb.BulkLoadRequest, kvpb.BulkLoadResponse]) error {
	var mutations []*kvpb.Mutation
	for {
		request, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, e := range request.GetEntries() {
			mutations = append(mutations, &kvpb.Mutation{Kind: kvpb.Mutation_KIND_PUT, Key: e.GetKey(), Value: e.GetValue()})
		}
		if !request.GetCommit() {
			continue
		}
		epoch, err := s.write("BulkLoad", nil, nil, mutations)
		if err != nil {
			return err
		}
		return stream.SendAndClose(&kvpb.BulkLoadResponse{Epoch: epoch, Keys: uint64(len(mutations))})
	}
}

// Pipeline implements kvpb.KVServiceServer. It answers in the order of the requests, but every third one
// late.
func (s *Server) Pipeline(stream grpc.BidiStreamingServer[kvpb.PipelineRequest, kvpb.PipelineResponse]) error {
	if err := s.enter("Pipeline"); err != nil {
		return err
	}
	var late []*kvpb.PipelineResponse
	for n := 0; ; n++ {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return sendAll(stream, late)
		}
		if err != nil {
			return err
		}
		if s.keep(request) {
			return status.Error(codes.Unavailable, "connection cut by the test")
		}
		response := s.answer(stream.Context(), request)
		if n%3 == 2 {
			late = append(late, response)
			continue
		}
		if err := sendAll(stream, append([]*kvpb.PipelineResponse{response}, late...)); err != nil {
			return err
		}
		late = nil
	}
}

func sendAll(stream grpc.BidiStreamingServer[kvpb.PipelineRequest, kvpb.PipelineResponse], all []*kvpb.PipelineResponse) error {
	for _, response := range all {
		if err := stream.Send(response); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) answer(ctx context.Context, request *kvpb.PipelineRequest) *kvpb.PipelineResponse {
	response := &kvpb.PipelineResponse{Id: request.GetId()}
	var err error
	switch r := request.GetRequest().(type) {
	case *kvpb.PipelineRequest_Get:
		answer := &kvpb.PipelineResponse_Get{}
		answer.Get, err = s.Get(ctx, r.Get)
		response.Response = answer
	case *kvpb.PipelineRequest_Put:
		answer := &kvpb.PipelineResponse_Put{}
		answer.Put, err = s.Put(ctx, r.Put)
		response.Response = answer
	case *kvpb.PipelineRequest_Delete:
		answer := &kvpb.PipelineResponse_Delete{}
		answer.Delete, err = s.Delete(ctx, r.Delete)
		response.Response = answer
	case *kvpb.PipelineRequest_BatchGet:
		answer := &kvpb.PipelineResponse_BatchGet{}
		answer.BatchGet, err = s.BatchGet(ctx, r.BatchGet)
		response.Response = answer
	case *kvpb.PipelineRequest_BatchWrite:
		answer := &kvpb.PipelineResponse_BatchWrite{}
		answer.BatchWrite, err = s.BatchWrite(ctx, r.BatchWrite)
		response.Response = answer
	case *kvpb.PipelineRequest_DeleteRange:
		answer := &kvpb.PipelineResponse_DeleteRange{}
		answer.DeleteRange, err = s.DeleteRange(ctx, r.DeleteRange)
		response.Response = answer
	default:
		err = NewError(codes.InvalidArgument, kvpb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "no request")
	}
	if err != nil {
		response.Response = &kvpb.PipelineResponse_Error{Error: status.Convert(err).Proto()}
	}
	return response
}
