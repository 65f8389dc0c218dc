# AWS Batch for many runs: one queue of on-demand and one of spot instances per instance type.

data "aws_vpc" "default" {
  count   = length(var.subnet_ids) == 0 ? 1 : 0
  default = true
}

data "aws_subnets" "default" {
  count = length(var.subnet_ids) == 0 ? 1 : 0

  filter {
    name   = "vpc-id"
    values = [data.aws_vpc.default[0].id]
  }
}

data "aws_subnet" "first" {
  id = local.subnet_ids[0]
}

locals {
  subnet_ids = length(var.subnet_ids) > 0 ? var.subnet_ids : data.aws_subnets.default[0].ids

  queues = merge([
    for type in var.instance_types : {
      replace(type, ".", "-")           = { instance_type = type, kind = "EC2" }
      "${replace(type, ".", "-")}-spot" = { instance_type = type, kind = "SPOT" }
    }
  ]...)
}

# -- network: outgoing traffic only; the file system is open to the machines only -----------------

resource "aws_security_group" "machines" {
  name_prefix = "${var.name}-machines-"
  description = "Machines of AWS Batch: no incoming traffic"
  vpc_id      = data.aws_subnet.first.vpc_id

  egress {
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    cidr_blocks = ["0.0.0.0/0"]
  }
}

# -- queues ------------------------------------------------------------------------------------

resource "aws_batch_compute_environment" "this" {
  for_each = local.queues

  compute_environment_name_prefix = "${var.name}-${each.key}-"
  type                            = "MANAGED"
  service_role                    = aws_iam_role.batch.arn

  compute_resources {
    type                = each.value.kind
    allocation_strategy = each.value.kind == "SPOT" ? "SPOT_PRICE_CAPACITY_OPTIMIZED" : "BEST_FIT_PROGRESSIVE"
    instance_type       = [each.value.instance_type]
    instance_role       = aws_iam_instance_profile.machine.arn
    min_vcpus           = 0
    max_vcpus           = var.max_vcpus
    subnets             = local.subnet_ids
    security_group_ids  = [aws_security_group.machines.id]
  }

  lifecycle {
    create_before_destroy = true
  }

  depends_on = [aws_iam_role_policy_attachment.batch]
}

resource "aws_batch_job_queue" "this" {
  for_each = local.queues

  name     = each.key
  state    = "ENABLED"
  priority = 1

  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.this[each.key].arn
  }
}

# -- secrets: only their names. Their values are set by hand with `aws secretsmanager
#    put-secret-value`, so that no file, no Terraform state and no job contains them --------------

resource "aws_secretsmanager_secret" "this" {
  for_each = var.secret_names

  name_prefix = "${var.name}/${each.key}-"
}

# -- a file system for the runs ------------------------------------------------------------------

resource "aws_efs_file_system" "runs" {
  count     = var.shared_runs ? 1 : 0
  encrypted = true
}

resource "aws_security_group" "runs" {
  count       = var.shared_runs ? 1 : 0
  name_prefix = "${var.name}-runs-"
  description = "The runs' file system, for the machines only"
  vpc_id      = data.aws_subnet.first.vpc_id

  ingress {
    from_port       = 2049
    to_port         = 2049
    protocol        = "tcp"
    security_groups = [aws_security_group.machines.id]
  }
}

resource "aws_efs_mount_target" "runs" {
  for_each = var.shared_runs ? toset(local.subnet_ids) : toset([])

  file_system_id  = aws_efs_file_system.runs[0].id
  subnet_id       = each.value
  security_groups = [aws_security_group.runs[0].id]
}

resource "aws_efs_access_point" "runs" {
  count          = var.shared_runs ? 1 : 0
  file_system_id = aws_efs_file_system.runs[0].id

  # the user of the image
  posix_user {
    uid = 1000
    gid = 1000
  }

  root_directory {
    path = "/runs"

    creation_info {
      owner_uid   = 1000
      owner_gid   = 1000
      permissions = "755"
    }
  }
}
