output "queues" {
  description = "For --job-queue."
  value       = sort([for queue in aws_batch_job_queue.this : queue.name])
}

output "flags" {
  description = "For cleanrl_utils.submit_exp and cleanrl_utils.benchmark --backend aws-batch."
  value = join(" ", concat(
    ["--region", var.region, "--execution-role", aws_iam_role.agent.arn],
    length(var.secret_names) > 0 ? ["--secrets"] : [],
    [for name, secret in aws_secretsmanager_secret.this : "${name}=${secret.arn}"],
    var.shared_runs ? ["--efs", "${aws_efs_file_system.runs[0].id}:${aws_efs_access_point.runs[0].id}"] : [],
  ))
}
